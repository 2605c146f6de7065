"""Workers that close or restart in the middle of requests: nobody waits for them, and what they leave is known."""

from __future__ import annotations

import contextlib
import threading

import pytest

from pdlink.bootstrap.keeper import RegistrationKeeper
from pdlink.bootstrap.messages import Registration
from pdlink.decode.links import Link, PrefillInstance
from pdlink.decode.receiver import Receiver
from pdlink.errors import DeadlineExceeded, StateError, TransferFailed
from pdlink.prefill.worker import PrefillWorker
from pdlink.transfer.failure import FailureReason
from pdlink.transfer.states import ReceiverState, SenderState
from tests.link.direct import SOURCE, TARGET, gated, serve, start
from tests.link.rig import (
    DEADLINE_S,
    PAGE_SIZE,
    Decode,
    Owner,
    Site,
    assert_all,
    finished,
    make_layout,
    wait_until,
)

pytestmark = pytest.mark.backend("ipc")


# --- workers that close ------------------------------------------------------------------------------


def test_a_prefill_worker_that_closes_in_the_middle_fails_the_request_and_says_so(site: Site) -> None:
    owners, decode = site.prefill(make_layout(4), 2), site.decode(make_layout(4))
    receiver, senders = start(site, owners, decode, last=False)
    wait_until(lambda: receiver.poll() is ReceiverState.PULLING)
    owners[0].node.close()
    with pytest.raises(TransferFailed, match=r"pre/dp0\.pp0\.cp0\.tp0 is closing"):
        receiver.wait(DEADLINE_S)
    assert_all(senders, SenderState.ABORTED)


def test_a_prefill_worker_that_closes_tells_those_whose_request_was_never_opened(site: Site) -> None:
    owners, decode = site.prefill(make_layout(4), 1), site.decode(make_layout(4))
    receiver = decode.worker.receive("never opened", site.instance, TARGET, 3 * PAGE_SIZE)
    wait_until(lambda: receiver.state is ReceiverState.SUBSCRIBED)
    owners[0].node.close()
    wait_until(lambda: receiver.state.is_final)
    assert receiver.failure
    assert receiver.failure.reason is FailureReason.PEER_GONE
    assert receiver.failure.text == "prefill worker pre/dp0.pp0.cp0.tp0 is closing"


def test_a_rank_that_withdraws_without_a_word_is_told_of_with_its_address(
    stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(stack, liveness_timeout_s=4.0, abort_ack_timeout_s=0.1)
    owners, decode = site.prefill(make_layout(4), 1), site.decode(make_layout(4))
    worker = owners[0].worker
    monkeypatch.setattr(PrefillWorker, "_on_subscribe", lambda *_: None)
    monkeypatch.setattr(PrefillWorker, "_reply", lambda *_: None)
    receiver = decode.worker.receive("t", site.instance, TARGET, 3 * PAGE_SIZE)
    wait_until(lambda: receiver.state is ReceiverState.SUBSCRIBED)
    with pytest.raises(DeadlineExceeded, match=r"is subscribed after 0.01 s, waiting for pre/dp0\.pp0\.cp0\.tp0"):
        receiver.wait(0.01)
    worker.close()
    wait_until(lambda: receiver.state.is_final)
    assert receiver.failure
    assert receiver.failure.reason is FailureReason.PEER_GONE
    assert f"was dialled at {worker.control_endpoint} and has withdrawn" in receiver.failure.text


def test_a_decode_worker_that_closes_waits_for_its_pulls_and_tells_prefill(site: Site) -> None:
    owners = site.prefill(make_layout(4), 2)
    decode, gate = gated(site)
    receiver, senders = start(site, owners, decode)
    gate.wait_held(2)
    gate.quiet.clear()
    ended = []
    receiver.on_end(lambda one: ended.append(one.poll()))
    closing = threading.Thread(target=decode.node.close)
    closing.start()
    assert_all(senders, SenderState.ABORTED)
    assert not receiver.poll().is_final
    assert closing.is_alive()
    gate.quiet.set()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert ended == [ReceiverState.ABORTED]
    with pytest.raises(StateError, match="closed"):
        decode.worker.receive("u", site.instance, TARGET, 3 * PAGE_SIZE)


def test_a_decode_worker_that_closes_while_it_resolves_leaves_no_thread(site: Site) -> None:
    before = {one.name for one in threading.enumerate()}
    decode = site.decode(make_layout(2), resolve_timeout_s=0.5)
    receiver = decode.worker.receive("t", site.instance, TARGET, 3 * PAGE_SIZE)
    decode.node.close()
    assert receiver.poll() is ReceiverState.ABORTED
    wait_until(lambda: {one.name for one in threading.enumerate()} <= before)


def test_a_callback_that_raises_or_calls_back_in_harms_nothing(site: Site) -> None:
    owners, decode = site.prefill(make_layout(4), 2), site.decode(make_layout(4))
    seen = []
    started = threading.Event()

    def call_in(receiver: Receiver) -> None:
        """Needs the worker from another thread, and waits for it: a lock held around it would be a deadlock."""
        helper = threading.Thread(target=lambda: seen.append(receive_another().transfer_id))
        helper.start()
        helper.join(DEADLINE_S)
        started.set()

    def receive_another() -> Receiver:
        return decode.worker.receive("next", site.instance, {"kv": [0]}, PAGE_SIZE)

    receiver = decode.worker.receive("t", site.instance, TARGET, 3 * PAGE_SIZE)
    receiver.on_end(lambda one: [][1])
    receiver.on_end(call_in)
    for owner in owners:
        owner.open("t", {"kv": SOURCE}).publish(SOURCE, last=True)
    receiver.wait(DEADLINE_S)
    assert started.wait(DEADLINE_S)
    assert seen == ["next"]
    serve(site, owners, decode)


# --- restarts and links ------------------------------------------------------------------------------


def test_a_restarted_rank_serves_the_next_request_and_the_old_one_fails_cleanly(site: Site) -> None:
    layout = make_layout(4)
    owners, decode = site.prefill(layout, 2), site.decode(layout)
    receiver, _ = start(site, owners, decode, last=False)
    wait_until(lambda: receiver.poll() is ReceiverState.PULLING)
    old = owners[1].worker.rank
    node = site.node()
    again = type(old)(old.instance, layout, old.sizes, old.rank, old.kinds, old.owned, old.regions)
    worker = node.prefill(again, [site.bootstrap.address])
    worker.wait_registered(DEADLINE_S)
    assert finished(receiver).poll() is ReceiverState.FAILED
    assert receiver.failure
    assert receiver.failure.reason is FailureReason.STALE
    assert receiver.failure.worker_id == old.worker_id
    serve(site, [owners[0], Owner(node, worker, owners[1].pool)], decode)


def test_two_decode_workers_of_one_process_do_not_break_each_others_links(site: Site) -> None:
    layout = make_layout(4)
    owners, decode = site.prefill(layout, 2), site.decode(layout)
    pool = site.pool(layout, {one.name: one.layers for one in layout.components})
    second = Decode(decode.node, decode.node.decode("dec2", layout, pool.regions), pool)
    serve(site, owners, decode, "a")
    serve(site, owners, second, "b")
    second.worker.close()
    serve(site, owners, decode, "c")


def lapse(site: Site, registration: Registration) -> None:
    """Let the lease of a worker run out."""
    service, done = site.bootstrap._service, threading.Event()

    def drop() -> None:
        service._directory._drop(registration.instance, registration.rank.worker_id)
        service._wake_watchers()
        done.set()

    assert site.bootstrap._loop is not None
    site.bootstrap._loop.call_soon_threadsafe(drop)
    assert done.wait(DEADLINE_S)


def test_a_request_that_runs_keeps_its_links_while_the_instance_goes_and_comes_back(site: Site) -> None:
    """As when a lease ran out for a moment: the processes are the same, so channels and pullers are."""
    layout = make_layout(4)
    owners = site.prefill(layout, 2, register=False)
    decode, gate = gated(site)
    said = [owner.worker.registration() for owner in owners]
    keepers = [RegistrationKeeper(one, [site.bootstrap.address]).start() for one in said]
    for keeper in keepers:
        keeper.wait_registered(DEADLINE_S)
    receiver, senders = start(site, owners, decode)
    gate.wait_held(2)
    lapse(site, said[1])
    wait_until(lambda: decode.worker._links.known(site.instance) is None)
    lapse(site, said[0])
    for keeper, one in zip(keepers, said, strict=True):
        keeper.update(one)  # it looks after its registration now, not in a third of a lease
    wait_until(lambda: site.bootstrap.num_workers == len(said))
    other = decode.worker.receive("other", site.instance, {"kv": [0, 1, 2]}, 3 * PAGE_SIZE)
    for owner in owners:
        owner.open("other", {"kv": [10, 11, 12]}).publish([10, 11, 12], last=True)
    gate.open.set()
    receiver.wait(DEADLINE_S)
    other.wait(DEADLINE_S)
    assert decode.pool.find_wrong("t", TARGET) is None
    assert decode.pool.find_wrong("other", {"kv": [0, 1, 2]}) is None
    assert_all(senders, SenderState.RELEASED)
    for keeper in keepers:
        keeper.close()


def test_an_instance_that_goes_away_just_when_it_was_found_costs_no_request(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its link was found for the request, which may use it, though a watch forgets it in the same moment."""
    owners, decode = site.prefill(make_layout(4), 2), site.decode(make_layout(4))
    links = decode.worker._links
    known, forgotten = links.known, []

    def known_and_forgotten(instance: PrefillInstance) -> Link | None:
        link = known(instance)
        if link:
            forgotten.append(link)
            links.forget(instance)
        return link

    monkeypatch.setattr(links, "known", known_and_forgotten)
    serve(site, owners, decode)
    assert forgotten
    monkeypatch.undo()
    serve(site, owners, decode, "next")
    assert decode.node.health().ok
