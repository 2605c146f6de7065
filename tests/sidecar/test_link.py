"""Requests between two engines whose links are in sidecars: verbs, refusals, and the end of a sidecar's process.

The sidecars and engines serve all tests of this file.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdlink.decode.receiver import Receiver
from pdlink.errors import DuplicateTransfer, InvalidInput, StateError, TransferFailed
from pdlink.sidecar import SidecarGone, SidecarNode, connect
from pdlink.transfer.failure import FailureReason
from pdlink.transfer.states import ReceiverState, SenderState
from tests.processes import PATIENCE_S, wait_until
from tests.sidecar.rig import (
    NUM_PAGES,
    PAGE_SIZE,
    Decode,
    Prefill,
    Rig,
    folder_for_sockets,
    is_gone,
    kill,
    make_layout,
    make_pool,
    serve,
    serve_at_last,
    serving,
)

pytestmark = pytest.mark.backend("ipc")

SOURCE, TARGET = [4, 0, 9], [1, 12, 7]


@dataclass
class Link:
    rig: Rig
    prefill: Prefill
    decode: Decode

    def receive(self, name: str, num_pages: int = len(TARGET)) -> Receiver:
        pages = {"kv": TARGET[:num_pages]}
        return self.decode.worker.receive(name, self.rig.instance, pages, num_pages * PAGE_SIZE)

    def serve(self, name: str) -> None:
        serve(self.rig, self.prefill, self.decode, name, SOURCE, TARGET)


@pytest.fixture(scope="module")
def link() -> Iterator[Link]:
    with folder_for_sockets() as folder, contextlib.ExitStack() as stack:
        rig = Rig(stack, Path(folder))
        nodes = [rig.connect(rig.sidecar(name)) for name in ("pre.sock", "dec.sock")]
        yield Link(rig, rig.prefill(nodes[0]), rig.decode(nodes[1]))


def test_pages_go_from_one_engines_memory_to_the_others_and_nowhere_else(link: Link) -> None:
    link.serve("whole")
    (told,) = link.decode.worker.explain(link.rig.instance).values()
    assert told.startswith("mapped: ")


def test_what_cannot_be_published_ends_the_request_on_both_sides_and_says_why(link: Link) -> None:
    sender, receiver = link.prefill.open("strange", SOURCE), link.receive("strange")
    sender.publish([NUM_PAGES + 5])
    with pytest.raises(TransferFailed, match="was refused"):
        receiver.wait(PATIENCE_S)
    assert wait_until(lambda: sender.poll() is SenderState.ABORTED)
    assert sender.failure is not None
    assert str(NUM_PAGES + 5) in sender.failure.text
    sender.publish(SOURCE)  # after the end it does nothing


def test_when_withdraw_has_returned_no_reader_succeeds(link: Link) -> None:
    sender, receiver = link.prefill.open("withdrawn", SOURCE), link.receive("withdrawn")
    sender.publish(SOURCE[:2])
    sender.withdraw([SOURCE[1]])
    with pytest.raises(TransferFailed, match="withdrawn"):
        receiver.wait(PATIENCE_S)
    assert wait_until(lambda: sender.poll() is SenderState.ABORTED)


def test_an_abort_on_either_side_ends_the_other(link: Link) -> None:
    sender, receiver = link.prefill.open("unwanted", SOURCE), link.receive("unwanted")
    receiver.abort("the client left")
    assert wait_until(lambda: receiver.poll() is ReceiverState.ABORTED)
    sender.publish(SOURCE, last=True)
    assert wait_until(lambda: sender.poll().is_final)
    with pytest.raises(TransferFailed, match="the client left"):
        sender.raise_failure()

    sender, receiver = link.prefill.open("dropped", SOURCE), link.receive("dropped")
    sender.abort("the engine is full")
    with pytest.raises(TransferFailed, match="the engine is full"):
        receiver.wait(PATIENCE_S)


def test_calls_are_refused_as_they_are_in_process(link: Link) -> None:
    sender, receiver = link.prefill.open("twice", SOURCE), link.receive("twice")
    with pytest.raises(DuplicateTransfer, match="twice"):
        link.prefill.worker.open("twice")
    with pytest.raises(DuplicateTransfer, match="twice"):
        link.receive("twice")
    with pytest.raises(InvalidInput, match="need 3 pages"):
        link.decode.worker.receive("short", link.rig.instance, {"kv": [1]}, 3 * PAGE_SIZE)
    with pytest.raises(InvalidInput, match="destination pages"):
        link.decode.worker.receive("far", link.rig.instance, {"kv": [NUM_PAGES]}, PAGE_SIZE)
    with pytest.raises(InvalidInput, match="must be integers"):
        sender.publish([0.5])  # type: ignore[list-item]
    sender.publish(SOURCE, last=True)
    with pytest.raises(StateError, match="to its end"):
        sender.publish([5])
    receiver.wait(PATIENCE_S)


def test_a_wait_that_is_too_short_names_whom_it_waits_for(link: Link) -> None:
    sender, receiver = link.prefill.open("late", SOURCE), link.receive("late")
    assert wait_until(lambda: receiver.poll() is ReceiverState.SUBSCRIBED and sender.first_pages() == {"kv": 0})
    with pytest.raises(TimeoutError, match="waiting for pre/"):
        receiver.wait(0.01)
    receiver.abort()
    assert wait_until(lambda: receiver.poll().is_final and sender.poll().is_final)


class Event:
    """A device event."""

    def __init__(self) -> None:
        self.is_over = False

    def query(self) -> bool:
        return self.is_over


def test_nobody_hears_of_a_page_before_its_device_event(link: Link) -> None:
    sender, receiver = link.prefill.open("computed", SOURCE), link.receive("computed")
    event = Event()
    sender.publish(SOURCE[:1], ready=event)
    sender.publish(SOURCE[1:], last=True)
    link.serve("another")  # what was said later is done, and of the other nothing was heard
    assert receiver.poll() is ReceiverState.SUBSCRIBED
    event.is_over = True
    receiver.wait(PATIENCE_S)


def test_a_device_event_that_cannot_be_asked_ends_the_request(link: Link) -> None:
    class Lost:
        def query(self) -> bool:
            raise RuntimeError("the device has fallen off the bus")

    sender, receiver = link.prefill.open("lost", SOURCE), link.receive("lost")
    sender.publish(SOURCE, last=True, ready=Lost())
    with pytest.raises(TransferFailed, match="could not be asked: RuntimeError: the device has fallen off the bus"):
        receiver.wait(PATIENCE_S)
    assert wait_until(lambda: sender.poll().is_final)


def test_a_callback_may_call_in(link: Link) -> None:
    sender, receiver = link.prefill.open("called", SOURCE), link.receive("called")
    done = threading.Event()

    def end(ended: Receiver) -> None:
        link.prefill.worker.open("from-a-callback").abort()
        done.set()

    receiver.on_end(end)
    sender.publish(SOURCE, last=True)
    assert done.wait(PATIENCE_S)
    assert receiver.poll() is ReceiverState.DONE


@pytest.mark.parametrize("side", [pytest.param("prefill", marks=pytest.mark.slow), "decode"])
def test_when_a_sidecars_process_is_killed_requests_fail_and_the_engine_goes_back_by_itself(
    link: Link, side: str
) -> None:
    sender, receiver = link.prefill.open(f"killed-{side}", SOURCE), link.receive(f"killed-{side}")
    sender.publish(SOURCE[:1])
    assert wait_until(lambda: receiver.poll() is ReceiverState.PULLING)
    node = getattr(link, side).node
    assert isinstance(node, SidecarNode)
    pid = serving(node)
    kill(pid)
    if side == "prefill":
        assert wait_until(lambda: sender.poll() is SenderState.ABORTED)
        failure = sender.failure
        receiver.abort()  # its own waits for a silent owner are tested elsewhere
    else:
        assert wait_until(lambda: receiver.poll() is ReceiverState.FAILED)
        failure = receiver.failure
        sender.abort()
    assert failure is not None
    assert failure.reason is FailureReason.PEER_GONE
    assert "the sidecar's process for this engine is gone" in failure.text
    assert is_gone(pid)
    assert wait_until(lambda: node.health().ok and receiver.poll().is_final)
    link.prefill.worker.wait_registered(PATIENCE_S)
    serve_at_last(link.rig, link.prefill, link.decode, f"after-{side}", SOURCE, TARGET)


def test_while_no_sidecar_answers_requests_are_refused_at_once(link: Link) -> None:
    with contextlib.closing(make_pool()) as pool, connect(link.rig.folder / "dec.sock") as node:
        worker = node.decode("alone", make_layout(), pool.regions)
        node.path = link.rig.folder / "nobody.sock"  # where it goes back to
        kill(serving(node))
        assert wait_until(lambda: not node.health().ok)
        with pytest.raises(SidecarGone, match="not attached"):
            worker.receive("refused", link.rig.instance, {"kv": [1]}, PAGE_SIZE)
        worker.close()
        with pytest.raises(SidecarGone, match=r"no sidecar answers|process for this engine is gone"):
            node.decode("later", make_layout(), pool.regions)


def test_the_trace_context_of_an_engine_reaches_the_owner_through_the_sidecar(link: Link) -> None:
    with contextlib.ExitStack() as stack:
        rig = Rig(stack, link.rig.folder)
        node, heard = rig.node(), []
        node.events.subscribe(heard.append)
        rig.prefill(node).open("trace", SOURCE).publish(SOURCE, last=True)
        context = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        told = ("trace", rig.instance, {"kv": TARGET}, len(TARGET) * PAGE_SIZE)
        link.decode.worker.receive(*told, trace_parent=context).wait(PATIENCE_S)
        assert wait_until(lambda: any(one.name == "request.end" for one in heard))
    (ended,) = [one.fields for one in heard if one.name == "request.end"]
    assert (ended["state"], ended["trace_parent"]) == ("released", context)
