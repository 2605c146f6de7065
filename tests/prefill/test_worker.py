"""One prefill rank against bare frames: early, late, repeated, reordered, and from strangers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from pdlink.backends.page_digests import PageDigests
from pdlink.config import load_settings
from pdlink.control.frames import (
    Abort,
    AbortAck,
    Failed,
    Pong,
    Ready,
    Refused,
    Release,
    Staged,
    Subscribed,
    Verdict,
)
from pdlink.errors import DuplicateTransfer, InvalidInput, StateError
from pdlink.layout.readers import ReaderSet
from pdlink.layout.regions import Region
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.digests import DigestKind, Digests
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.states import SenderState
from tests.prefill.peer import Desk, Peer, desk
from tests.prefill.rig import INCARNATION, SOLO, subscribe

ENOUGH = Failure(FailureReason.ABORTED, "enough")
OTHER = ReaderSet("other")


@pytest.fixture
def at() -> Iterator[Desk]:
    with desk() as made:
        yield made


def pulled(frames: list[Ready]) -> dict[int, int]:
    return {one.sequence: one.generation for one in frames}


# --- before the engine opens the request -------------------------------------------------------------


def test_a_subscribe_that_is_early_is_served_when_the_request_opens(at: Desk) -> None:
    peer = at.peer()
    assert peer.ask(1, subscribe(SOLO)) == [Subscribed(INCARNATION, 0, False)]
    at.worker.open("t").publish([4], last=True)
    assert [one.page_ids.tolist() for one in peer.answers(Ready, 1)] == [[4]]


def test_an_abort_that_is_early_ends_the_request_when_it_opens(at: Desk) -> None:
    peer = at.peer()
    peer.send(1, subscribe(SOLO))
    assert AbortAck() in peer.ask(1, Abort(ENOUGH, SOLO))
    sender = at.worker.open("t")
    assert sender.poll() is SenderState.ABORTED
    assert sender.failure
    assert sender.failure.text == "enough"


def test_a_subscribe_that_comes_after_its_abort_revives_nothing(at: Desk) -> None:
    peer = at.peer()
    peer.ask(1, Abort(ENOUGH, SOLO))
    assert peer.ask(1, subscribe(SOLO)) == []
    assert at.worker.open("t").poll() is SenderState.ABORTED


def test_a_newer_attempt_replaces_an_early_abort(at: Desk) -> None:
    peer = at.peer()
    peer.ask(1, Abort(ENOUGH, SOLO))
    peer.ask(2, subscribe(SOLO))
    peer.ask(1, Abort(ENOUGH, SOLO))
    at.worker.open("t").publish([4])
    assert len(peer.answers(Ready, 2)) == 1


def test_a_release_of_nothing_is_early_too_and_counts_when_the_request_opens(at: Desk) -> None:
    peer = at.peer()
    assert peer.ask(1, Release(SOLO)) == [Verdict(True)]
    sender = at.worker.open("t")
    sender.publish([4], last=True)
    assert sender.poll() is SenderState.RELEASED


def test_an_early_reader_is_not_hidden_by_one_of_another_set_nor_ended_by_its_abort(at: Desk) -> None:
    first, second = at.peer(), at.peer()
    first.ask(1, subscribe(SOLO))
    second.ask(2, subscribe(OTHER))
    second.ask(2, Abort(ENOUGH, OTHER))
    sender = at.worker.open("t")
    sender.publish([4], last=True)
    ready = first.answers(Ready, 1)
    assert len(ready) == 1
    assert first.ask(1, Release(SOLO, pulled(ready))) == [Verdict(True)]
    assert sender.poll() is SenderState.RELEASED


def test_of_two_early_sets_the_second_is_refused_by_name(at: Desk) -> None:
    first, second = at.peer(), at.peer()
    first.ask(1, subscribe(SOLO))
    second.ask(2, subscribe(OTHER))
    at.worker.open("t")
    (refusal,) = second.answers(Refused, 2)
    assert refusal.cause.reason is FailureReason.DUPLICATE


# --- old attempts ------------------------------------------------------------------------------------


def test_a_late_abort_of_an_old_attempt_does_not_end_the_next_request_of_that_id(at: Desk) -> None:
    peer = at.peer()
    old = at.worker.open("t")
    peer.ask(1, subscribe(SOLO))
    assert AbortAck() in peer.ask(1, Abort(ENOUGH, SOLO))
    assert old.poll() is SenderState.ABORTED
    new = at.worker.open("t")
    assert peer.ask(1, Abort(ENOUGH, SOLO)) == [AbortAck()]
    assert new.poll() is SenderState.OPEN


def test_an_abort_that_was_never_heard_does_not_end_the_next_request_either(at: Desk) -> None:
    """The prefill engine ended the first request by itself, so the first abort of its reader comes too late."""
    peer = at.peer()
    old = at.worker.open("t")
    peer.ask(1, subscribe(SOLO))
    old.abort()
    new = at.worker.open("t")
    assert AbortAck() in peer.ask(1, Abort(ENOUGH, SOLO))
    assert new.poll() is SenderState.OPEN
    assert peer.ask(1, subscribe(SOLO)) == []
    peer.ask(2, subscribe(SOLO))
    new.publish([3], last=True)
    assert len(peer.answers(Ready, 2)) == 1


def test_an_abort_after_the_verdict_is_answered_and_ends_nothing(at: Desk) -> None:
    peer = at.peer()
    sets = [ReaderSet("dec", index, 2) for index in range(2)]
    sender = at.worker.open("t")
    sender.publish([4], last=True)
    peer.send(1, subscribe(sets[0]))
    ready = peer.answers(Ready, 1)
    assert peer.ask(1, Release(sets[0], pulled(ready))) == [Verdict(True)]
    assert peer.ask(1, Abort(ENOUGH, sets[0])) == [AbortAck()]
    assert sender.poll() is SenderState.PUBLISHED


def test_a_waiting_attempt_is_served_as_soon_as_its_request_opens(at: Desk) -> None:
    peer = at.peer()
    old = at.worker.open("t")
    old.publish([4], last=True)
    peer.ask(1, subscribe(SOLO))
    assert peer.ask(2, subscribe(SOLO)) == [Subscribed(INCARNATION, 0, False)]
    peer.ask(1, Abort(ENOUGH, SOLO))
    at.worker.open("t").publish([5], last=True)
    assert [one.page_ids.tolist() for one in peer.answers(Ready, 2)] == [[5]]


def test_a_waiting_attempt_that_gives_up_leaves_nothing_behind(at: Desk) -> None:
    peer = at.peer()
    old = at.worker.open("t")
    peer.ask(1, subscribe(SOLO))
    peer.ask(2, subscribe(SOLO))
    assert AbortAck() in peer.ask(2, Abort(ENOUGH, SOLO))
    assert old.poll() is SenderState.OPEN
    old.abort()
    assert at.worker.open("t").poll() is SenderState.OPEN


def test_the_id_is_free_for_any_reader_set_once_its_request_is_over(at: Desk) -> None:
    peer = at.peer()
    sender = at.worker.open("t")
    sender.publish([4], last=True)
    peer.send(1, subscribe(SOLO))
    peer.ask(1, Release(SOLO, pulled(peer.answers(Ready, 1))))
    assert sender.poll() is SenderState.RELEASED
    for index in range(2):
        readers = ReaderSet("other", index, 2)
        assert peer.ask(10 + index, subscribe(readers)) == [Subscribed(INCARNATION, 0, False)]
    at.worker.open("t").publish([5], last=True)
    assert len(peer.answers(Ready)) == 2


# --- verdicts ----------------------------------------------------------------------------------------


def test_a_verdict_is_repeated_to_duplicates_though_the_pages_are_long_reused(at: Desk) -> None:
    peer = at.peer()
    sender = at.worker.open("t")
    sender.publish([4], last=True)
    peer.send(1, subscribe(SOLO))
    release = Release(SOLO, pulled(peer.answers(Ready, 1)))
    assert peer.ask(1, release) == [Verdict(True)]
    at.worker.open("t").publish([4], last=True)
    assert peer.ask(1, release) == [Verdict(True)]


def test_a_release_of_pages_that_nobody_here_knows_is_denied(at: Desk) -> None:
    (verdict,) = at.peer().ask(1, Release(SOLO, {0: 5}))
    assert isinstance(verdict, Verdict)
    assert not verdict.unchanged
    assert verdict.cause
    assert verdict.cause.reason is FailureReason.STALE


def test_two_workers_never_give_their_publications_the_same_generation() -> None:
    """A restarted rank that publishes the same request again must not vouch for what its predecessor published."""
    seen: list[set[int]] = []
    for _ in range(2):
        with desk() as at:
            peer = at.peer()
            peer.ask(1, subscribe(SOLO))
            sender = at.worker.open("t")
            for page in range(5):
                sender.publish([page])
            seen.append(set(pulled(peer.answers(Ready)).values()))
    assert len(seen[0]) == len(seen[1]) == 5
    assert not seen[0] & seen[1]


# --- bounds and ends ---------------------------------------------------------------------------------


def test_a_live_id_is_refused_and_the_first_request_goes_on(at: Desk) -> None:
    sender = at.worker.open("t")
    with pytest.raises(DuplicateTransfer, match="'t' is open"):
        at.worker.open("t")
    assert sender.poll() is SenderState.OPEN
    sender.abort()
    assert at.worker.open("t") is not sender


@pytest.mark.parametrize("transfer_id", ["", "x" * 257, "ü" * 129])
def test_an_id_that_no_frame_can_carry_is_refused(at: Desk, transfer_id: str) -> None:
    with pytest.raises(InvalidInput, match="1 to 256 bytes"):
        at.worker.open(transfer_id)


def test_requests_that_ended_make_room_and_live_ones_do_not() -> None:
    with desk(load_settings({}, max_transfers=2)) as at:
        live = at.worker.open("a")
        for number in range(5):
            at.worker.open(f"b{number}").abort()
        at.worker.open("c")
        with pytest.raises(StateError, match="PDLINK_MAX_TRANSFERS"):
            at.worker.open("d")
        assert live.poll() is SenderState.OPEN


def test_frames_that_no_receiver_sends_are_counted_and_change_nothing(at: Desk) -> None:
    sender = at.worker.open("t")
    peer = at.peer()
    for body in (AbortAck(), Verdict(True), Staged(1, 2, 3, 4, 5, 6), Failed(ENOUGH), Pong(1, 2)):
        assert peer.ask(1, body) == []
    assert at.seen.count("control.unexpected") == 5
    assert sender.poll() is SenderState.OPEN


def test_closing_tells_the_readers_and_opens_nothing_more(at: Desk) -> None:
    peer = at.peer()
    sender = at.worker.open("t")
    peer.ask(1, subscribe(SOLO))
    at.worker.close()
    at.worker.close()
    assert sender.poll() is SenderState.ABORTED
    frame = peer._frames.get(timeout=60)
    assert isinstance(frame.body, Failed)
    assert "is closing" in frame.body.cause.text
    with pytest.raises(StateError, match="closed"):
        at.worker.open("u")


def test_hashing_keeps_no_frame_waiting_and_pages_withdrawn_meanwhile_are_never_vouched_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashing, go_on = threading.Event(), threading.Event()

    def slow(digests: PageDigests, kind: DigestKind, regions: Sequence[Region], pages: Int64Array) -> Digests:
        hashing.set()
        assert go_on.wait(60)
        return np.zeros((len(regions), len(pages)), dtype=np.uint64)

    monkeypatch.setattr(PageDigests, "__call__", slow)
    with desk(load_settings({}, verify_digests=True)) as at:
        peer = at.peer()
        sender = at.worker.open("t")
        peer.ask(1, subscribe(SOLO))
        publishing = threading.Thread(target=sender.publish, args=([3, 4],))
        publishing.start()
        assert hashing.wait(60)
        assert peer.answers(Ready) == []
        withdrawing = threading.Thread(target=sender.withdraw, args=([4],))
        withdrawing.start()
        go_on.set()
        for thread in (publishing, withdrawing):
            thread.join(60)
        # Published first and taken back at once, or never seen at all: in no order a yes.
        assert sender.poll() is SenderState.ABORTED
        frames = peer.answers(Ready)
        verdicts = [one for one in peer.ask(1, Release(SOLO, pulled(frames))) if isinstance(one, Verdict)]
        assert [one.unchanged for one in verdicts] == [False]


def test_pages_that_nobody_wants_expire_by_themselves() -> None:
    with desk(load_settings({}, publication_lease_s=0.3)) as at:
        ended = []
        sender = at.worker.open("t")
        sender.publish([1], last=True)
        peer = at.peer()
        while not sender.poll().is_final:
            peer.collect()
            ended.append(sender.poll())
        assert ended[-1] is SenderState.EXPIRED


# --- one id, several requests ------------------------------------------------------------------------


def ended(at: Desk, peer: Peer) -> None:
    """A first request of the id that attempt 1 has read; it is remembered for a while."""
    at.worker.open("t").publish([4], last=True)
    peer.send(1, subscribe(SOLO))
    assert peer.ask(1, Release(SOLO, pulled(peer.answers(Ready, 1)))) == [Verdict(True)]


def test_a_release_of_nothing_counts_for_the_later_request_that_it_means(at: Desk) -> None:
    peer = at.peer()
    ended(at, peer)
    assert peer.ask(2, Release(SOLO)) == [Verdict(True)]
    sender = at.worker.open("t")
    sender.publish([5], last=True)
    assert sender.poll() is SenderState.RELEASED


def test_a_release_of_nothing_counts_for_a_later_request_though_an_earlier_one_is_being_read(at: Desk) -> None:
    peer = at.peer()
    sender = at.worker.open("t")
    peer.send(1, subscribe(SOLO))
    assert Verdict(True) in peer.ask(2, Release(SOLO))
    sender.publish([4], last=True)
    assert peer.ask(1, Release(SOLO, pulled(peer.answers(Ready, 1)))) == [Verdict(True)]
    assert sender.poll() is SenderState.RELEASED
    later = at.worker.open("t")
    later.publish([5], last=True)
    assert later.poll() is SenderState.RELEASED


def test_an_abort_ends_the_later_request_that_it_means(at: Desk) -> None:
    peer = at.peer()
    ended(at, peer)
    peer.ask(2, subscribe(SOLO))
    assert peer.ask(2, Abort(ENOUGH, SOLO)) == [AbortAck()]
    assert at.worker.open("t").poll() is SenderState.ABORTED


def test_a_reader_of_a_request_that_made_way_for_another_is_told_at_once(at: Desk) -> None:
    """Its frame about the end was lost. It must not wait for a deadline, nor be vouched for."""
    peer = at.peer()
    old = at.worker.open("t")
    old.publish([4], last=True)
    peer.send(1, subscribe(SOLO))
    release = Release(SOLO, pulled(peer.answers(Ready, 1)))
    old.abort("the engine says no")
    new = at.worker.open("t")
    peer.collect()
    (refused,) = peer.ask(1, subscribe(SOLO))
    assert isinstance(refused, Refused)
    assert refused.cause.text == "the engine says no"
    (denied,) = peer.ask(1, release)
    assert isinstance(denied, Verdict)
    assert not denied.unchanged
    assert peer.ask(1, Abort(ENOUGH, SOLO)) == [AbortAck()]
    assert peer.ask(1, subscribe(SOLO)) == []
    assert new.poll() is SenderState.OPEN


def test_frames_of_an_attempt_that_was_replaced_do_not_touch_a_later_request() -> None:
    with desk(load_settings({}, liveness_timeout_s=0.3)) as at:
        peer = at.peer()
        old = at.worker.open("t")
        old.publish([4], last=True)
        peer.send(1, subscribe(SOLO))
        peer.collect()
        while not peer.answers(Ready, 2):
            peer.send(2, subscribe(SOLO))
        old.abort()
        new = at.worker.open("t")
        peer.collect()
        assert peer.ask(1, Abort(ENOUGH, SOLO)) == [AbortAck()]
        assert new.poll() is SenderState.OPEN


def test_a_reader_that_falls_silent_gives_its_pages_back_long_before_the_lease() -> None:
    with desk(load_settings({}, liveness_timeout_s=0.3)) as at:
        sender = at.worker.open("t")
        sender.publish([1], last=True)
        peer = at.peer()
        peer.send(1, subscribe(SOLO))
        assert len(peer.answers(Ready, 1)) == 1
        while not sender.poll().is_final:
            peer.collect()
        assert sender.poll() is SenderState.EXPIRED
        assert sender.failure
        assert sender.failure.reason is FailureReason.PEER_GONE


# --- the worker closes -------------------------------------------------------------------------------


def test_a_worker_that_closes_refuses_whom_it_has_kept_waiting(at: Desk) -> None:
    peer = at.peer()
    peer.ask(1, subscribe(SOLO), "never opened")
    at.worker.close()
    told = peer.next()
    assert (told.transfer_id, told.attempt) == ("never opened", 1)
    assert isinstance(told.body, Refused)
    assert told.body.cause.text == "prefill worker pre/dp0.pp0.cp0.tp0 is closing"
    assert told.body.cause.fix


def test_a_subscribe_while_a_worker_closes_is_refused(at: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = at.peer()
    peer.collect()
    with monkeypatch.context() as held:
        held.setattr(at.worker._server, "close", lambda: None)
        at.worker.close()
    peer.send(1, subscribe(SOLO))
    told = peer.next().body
    assert isinstance(told, Refused)
    assert "is closing" in told.cause.text
    at.worker._server.close()
