"""Every kind of thread of a link dies for real: what it served fails at once on both sides and by its name, health is
red, the log has it once, and both ends still close.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from pdlink import threads
from pdlink.backends.base import Backend, PullHandle, PullStatus
from pdlink.backends.copiers import HostCopier
from pdlink.bootstrap.client import BootstrapClient
from pdlink.decode.pull_job import PullJob
from pdlink.decode.puller import Puller
from pdlink.decode.receiver import Receiver
from pdlink.errors import PartDead
from pdlink.events import Event
from pdlink.prefill import packer
from pdlink.prefill.sender import Sender
from pdlink.runtime.node import Node
from pdlink.transfer.descriptors import PullBatch
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.states import ReceiverState, SenderState
from tests.link.direct import SOURCE, TARGET, serve, start
from tests.link.rig import (
    DEADLINE_S,
    PAGE_SIZE,
    Decode,
    Gate,
    Site,
    assert_all,
    finished,
    make_layout,
    wait_until,
)
from tests.link.staged import arena, pair, publish_scattered, staged_site

pytestmark = pytest.mark.backend("ipc")
PROMPT_S = 45.0
"""Far below every deadline of a link but its repeats."""
SLOW = {"confirm_timeout_s": 60.0, "subscribe_timeout_s": 60.0, "liveness_timeout_s": 60.0}


class Killed(BaseException):
    """No `Exception`, so that no boundary but a thread's own catches it."""


def kill(*arguments: object) -> Any:
    raise Killed("for the test")


class Deaths:
    """The events and log lines that tell of deaths in a node."""

    def __init__(self, node: Node, caplog: pytest.LogCaptureFixture) -> None:
        self.node = node
        self.caplog = caplog
        self.events: list[Event] = []
        node.events.subscribe(lambda event: self.events.append(event) if event.name == "thread.died" else None)
        assert node.health().ok

    def check(self, part: str, thread: str) -> str:
        """One death, told once each way, of that thread of that part; the sentence that says so."""
        wait_until(lambda: bool(self.events) and not self.node.health().ok)
        (event,) = self.events
        assert event.fields["owner"] == part
        assert str(event.fields["thread"]).startswith(thread)
        report = self.node.health()
        assert report.reasons == (event.fields["text"],)
        assert [name for name, why in report.parts.items() if why] == [part]
        lines = [one for one in self.caplog.records if one.levelno == logging.CRITICAL]
        assert [one.message for one in lines] == [event.fields["text"]]
        assert lines[0].exc_info
        return report.reasons[0]


def failed(receiver: Receiver) -> Failure:
    wait_until(lambda: receiver.poll().is_final, PROMPT_S)
    assert receiver.poll() is ReceiverState.FAILED
    assert receiver.failure
    return receiver.failure


def close_twice(node: Node, kind: str = "pdlink-pull-") -> None:
    node.close()
    node.close()
    assert not [one.name for one in threading.enumerate() if one.name.startswith(kind)]


@pytest.fixture
def slow(stack: contextlib.ExitStack) -> Site:
    """A site where nothing ends by a deadline."""
    return Site(stack, **SLOW)


# --- decode ------------------------------------------------------------------------------------------


class Deadly(Gate):
    """Pulls from a backend of which one call ends the thread that makes it."""

    def __init__(self, inner: Backend, call: str) -> None:
        super().__init__(inner)
        self.open.set()
        self.call = call

    def poll(self, handle: PullHandle) -> PullStatus:
        return kill() if self.call == "poll" else super().poll(handle)

    def submit(self, batch: PullBatch) -> PullHandle:
        return kill() if self.call == "submit" else super().submit(batch)


def deadly(site: Site, call: str, **settings: object) -> tuple[Decode, Deadly]:
    made: list[Deadly] = []

    def wrap(inner: Backend) -> Backend:
        made.append(Deadly(inner, call))
        return made[0]

    return site.decode(make_layout(4), wrap=wrap, **settings), made[0]


class Lossy(queue.SimpleQueue[PullJob | None]):
    """Takes a job out and then ends the thread that asked for it."""

    def get(self, block: bool = True, timeout: float | None = None) -> PullJob | None:
        job = super().get(block, timeout)
        return kill() if job else job


@pytest.mark.parametrize("is_known", [True, False])
def test_a_puller_that_dies_with_a_job_in_its_hand_keeps_no_request_draining(slow, monkeypatch, is_known) -> None:
    owners, decode = slow.prefill(make_layout(4), 1), slow.decode(make_layout(4))
    monkeypatch.setattr("pdlink.decode.puller.queue.SimpleQueue", Lossy)
    if not is_known:  # and should it ever forget one, that ends with the thread and its wire
        monkeypatch.setattr(Puller, "_report", lambda *_: None)
    receiver = decode.worker.receive("t", slow.instance, {"kv": [0, 1, 2]}, 3 * PAGE_SIZE)
    sender = owners[0].open("t", {"kv": SOURCE})
    sender.publish(SOURCE, last=True)
    cause = failed(receiver)
    assert cause.reason is FailureReason.INTERNAL
    assert "Killed: for the test" in cause.text
    assert "restart it" in cause.fix
    assert_all([sender], SenderState.ABORTED)
    close_twice(decode.node)


@pytest.mark.parametrize("call", ["submit", "poll"])
def test_a_puller_that_dies_fails_its_requests_on_both_sides_and_later_ones_at_once(slow, caplog, call) -> None:
    owners = slow.prefill(make_layout(4), 2)
    decode, backend = deadly(slow, call)
    deaths = Deaths(decode.node, caplog)
    waiting = decode.worker.receive("waits", slow.instance, TARGET, 3 * PAGE_SIZE)
    idle = [owner.open("waits", {"kv": SOURCE}) for owner in owners]
    idle[0].publish()
    receiver = decode.worker.receive("t", slow.instance, {"kv": [0, 1, 2]}, 3 * PAGE_SIZE)
    senders = [owner.open("t", {"kv": SOURCE}) for owner in owners]
    senders[0].publish(SOURCE, last=True)
    cause = failed(receiver)
    said = deaths.check("decode dec", "pdlink-pull-pre/")
    assert cause.reason is FailureReason.INTERNAL
    assert cause.text == said
    assert "Killed: for the test" in said
    assert failed(waiting).text == said
    assert_all([*senders, *idle], SenderState.ABORTED)
    assert all(said in str(one.failure) for one in senders)
    # Whatever was raised, it was made quiet before anybody could hand its pages out again.
    assert bool(backend.fenced) is (call == "submit")
    again = decode.worker.receive("next", slow.instance, TARGET, 3 * PAGE_SIZE)
    assert failed(again).text == said
    close_twice(decode.node)


def test_a_control_loop_that_dies_in_a_small_pull_fails_that_pull_too(slow, caplog) -> None:
    layout = make_layout(2)
    owners = slow.prefill(layout, 1)
    backend: list[Deadly] = []
    decode = slow.decode(layout, wrap=lambda inner: backend.append(Deadly(inner, "")) or backend[0])
    serve(slow, owners, decode)
    deaths = Deaths(decode.node, caplog)
    backend[0].call = "poll"
    receiver = decode.worker.receive("t", slow.instance, {"kv": [0]}, PAGE_SIZE)
    sender = owners[0].open("t", {"kv": [7]})
    sender.publish([7], last=True)
    failed(receiver)
    deaths.check("control loop", "pdlink-control")
    assert_all([sender], SenderState.ABORTED)
    close_twice(decode.node)


def test_a_decode_loop_that_dies_fails_every_request_on_both_sides_and_refuses_new_ones(slow, caplog) -> None:
    owners, decode = slow.prefill(make_layout(4), 2), slow.decode(make_layout(4))
    deaths = Deaths(decode.node, caplog)
    receiver, senders = start(slow, owners, decode, last=False)
    wait_until(lambda: receiver.poll() is ReceiverState.PULLING)
    called = threading.Event()
    receiver.on_end(lambda one: called.set())
    decode.node.loop.call_soon(kill)
    cause = failed(receiver)
    said = deaths.check("control loop", "pdlink-control")
    assert cause.text == said
    assert called.wait(DEADLINE_S)
    assert_all(senders, SenderState.ABORTED)
    assert all(said in str(one.failure) for one in senders)
    with pytest.raises(PartDead, match="pdlink-control of control loop died"):
        decode.worker.receive("next", slow.instance, TARGET, 3 * PAGE_SIZE)
    close_twice(decode.node)
    other = slow.decode(make_layout(4), name="other")
    serve(slow, owners, other)


def test_pulls_under_way_when_the_loop_dies_are_quiet_before_the_request_ends(slow, caplog) -> None:
    layout, gates = make_layout(4), []
    owners = slow.prefill(layout, 1)
    decode = slow.decode(layout, wrap=lambda inner: gates.append(Gate(inner)) or gates[0])
    receiver, _ = start(slow, owners, decode)
    gates[0].wait_held(1)
    gates[0].quiet.clear()
    called = threading.Event()
    receiver.on_end(lambda one: called.set())
    decode.node.loop.call_soon(kill)
    assert decode.node.loop._thread.join(DEADLINE_S)
    assert not receiver.poll().is_final
    gates[0].quiet.set()
    failed(receiver)
    assert called.wait(DEADLINE_S)
    close_twice(decode.node)


def test_a_resolve_that_dies_fails_all_that_wait_for_it_and_the_next_one_is_served(slow, caplog, monkeypatch) -> None:
    owners, decode = slow.prefill(make_layout(4), 1), slow.decode(make_layout(4))
    deaths = Deaths(decode.node, caplog)
    asked, go = threading.Event(), threading.Event()

    def wait_ready(*arguments: object) -> None:
        asked.set()
        assert go.wait(DEADLINE_S)
        kill()

    with monkeypatch.context() as patch:
        patch.setattr(BootstrapClient, "wait_ready", wait_ready)
        receivers = [
            decode.worker.receive(f"t{number}", slow.instance, {"kv": [number]}, PAGE_SIZE) for number in range(3)
        ]
        assert asked.wait(DEADLINE_S)
        go.set()
        causes = [failed(one) for one in receivers]
    said = deaths.check("decode dec", "pdlink-resolve")
    assert [one.text for one in causes] == [said] * 3
    serve(slow, owners, decode)
    close_twice(decode.node)


def test_a_watch_that_dies_leaves_running_requests_alone_and_the_next_one_asks_anew(slow, caplog, monkeypatch) -> None:
    owners, decode = slow.prefill(make_layout(4), 2), slow.decode(make_layout(4))
    deaths = Deaths(decode.node, caplog)
    links = decode.worker._links
    monkeypatch.setattr(links, "_on_answer", kill)
    receiver, senders = start(slow, owners, decode, last=False)
    deaths.check("watch of pre", "pdlink-watch-pre")
    wait_until(lambda: links.known(slow.instance) is None)
    monkeypatch.undo()
    for sender in senders:
        sender.publish(last=True)
    receiver.wait(DEADLINE_S)
    serve(slow, owners, decode)
    assert links.known(slow.instance)
    close_twice(decode.node)


# --- prefill -----------------------------------------------------------------------------------------


def test_a_prefill_loop_that_dies_fails_its_requests_on_both_sides_and_leaves_the_directory(slow, caplog) -> None:
    owners, decode = slow.prefill(make_layout(4), 2), slow.decode(make_layout(4))
    deaths = Deaths(owners[0].node, caplog)
    receiver, senders = start(slow, owners, decode, last=False)
    wait_until(lambda: receiver.poll() is ReceiverState.PULLING)
    owners[0].node.loop.call_soon(kill)
    cause = failed(receiver)
    said = deaths.check("control loop", "pdlink-control")
    assert said in cause.text
    assert cause.worker_id == owners[0].worker.rank.worker_id
    assert_all(senders, SenderState.ABORTED)
    with pytest.raises(PartDead, match="pdlink-control of control loop died"):
        owners[0].worker.open("next")
    wait_until(lambda: slow.bootstrap.num_workers == 1)
    close_twice(owners[0].node, f"pdlink-keeper-{owners[0].worker.rank.worker_id}")


class Deadliest(HostCopier):
    def copy(self, batch: PullBatch, stop: Callable[[], bool]) -> bool:
        return kill()


def test_a_packer_that_dies_fails_who_waits_for_it_and_who_comes_later(stack, caplog, monkeypatch) -> None:
    site = staged_site(stack, **SLOW)
    _, owners, decode = pair(site, cp=1)
    monkeypatch.setattr(packer, "open_copier", lambda memory, device: Deadliest())
    deaths = Deaths(owners[0].node, caplog)
    worker_id = owners[0].worker.rank.worker_id
    said = ""
    for transfer_id in ("t", "next"):
        receiver = decode.worker.receive(transfer_id, site.instance, {"kv": [0, 1, 2, 3]}, 4 * PAGE_SIZE)
        senders = publish_scattered(site, owners, 4, transfer_id)
        cause = failed(receiver)
        said = deaths.check(f"prefill {worker_id}", f"pdlink-pack-{worker_id}")
        assert said in cause.text
        assert_all(senders, SenderState.ABORTED)
    slots = arena(owners[0].node).slots
    wait_until(lambda: slots.num_free == slots.num_slots)
    close_twice(decode.node)
    close_twice(owners[0].node, "pdlink-pack-")


class Endless:
    """A device event that does not come, until it kills who asks."""

    def __init__(self) -> None:
        self.deadly = False

    def query(self) -> bool:
        return kill() if self.deadly else False


def test_a_watch_of_device_events_that_dies_fails_who_waits_and_who_comes_later(slow, caplog) -> None:
    owners, decode = slow.prefill(make_layout(4), 1), slow.decode(make_layout(4))
    deaths = Deaths(owners[0].node, caplog)
    worker_id = owners[0].worker.rank.worker_id
    events, waiting = (Endless(), Endless()), []
    for number, event in enumerate(events):
        receiver = decode.worker.receive(f"t{number}", slow.instance, {"kv": [number]}, PAGE_SIZE)
        sender = owners[0].open(f"t{number}", {"kv": [number]})
        sender.publish([number], last=True, ready=event)
        waiting.append((receiver, sender))
    events[0].deadly = True
    for receiver, sender in waiting:
        cause = failed(receiver)
        said = deaths.check(f"prefill {worker_id}", f"pdlink-ready-{worker_id}")
        assert said in cause.text
        assert_all([sender], SenderState.ABORTED)
    later: Sender = owners[0].open("later", {"kv": [5]})
    later.publish([5], last=True, ready=Endless())
    assert later.poll() is SenderState.ABORTED
    serve(slow, owners, decode)
    close_twice(owners[0].node, "pdlink-ready-")


def test_a_death_keeps_nothing_alive_that_its_thread_held(slow, monkeypatch) -> None:
    monkeypatch.setattr(threads.log, "critical", lambda *told, **also: None)  # tests keep what is logged
    decode = slow.decode(make_layout(4))

    class Held:
        def __call__(self) -> None:
            kill()

    held = Held()
    gone = weakref.ref(held)
    decode.node.loop.call_soon(held)
    assert decode.node.loop._thread.join(DEADLINE_S)
    del held
    gc.collect()
    assert decode.node.loop.death
    assert gone() is None


def test_requests_for_a_slow_instance_take_one_thread_of_many(slow, monkeypatch) -> None:
    """So that a flood of them leaves the threads to instances that answer."""
    owners, decode = slow.prefill(make_layout(4), 1), slow.decode(make_layout(4))
    go, asked = threading.Event(), []
    real = BootstrapClient.wait_ready

    def wait_ready(client: BootstrapClient, instance: str, *arguments: Any) -> Any:
        asked.append(instance)
        if instance == "slow":
            assert go.wait(DEADLINE_S)
        return real(client, instance, *arguments)

    monkeypatch.setattr(BootstrapClient, "wait_ready", wait_ready)
    lost = type(slow.instance)("slow", slow.instance.bootstraps)
    flood = [decode.worker.receive(f"f{number}", lost, {"kv": [number % 16]}, PAGE_SIZE) for number in range(200)]
    serve(slow, owners, decode)
    assert asked.count("slow") == 1
    decode.node.close()
    go.set()
    assert {finished(one).poll() for one in flood} == {ReceiverState.ABORTED}
