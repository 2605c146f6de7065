"""The readers of one request on one prefill rank: sets, attempts that take over, and who holds its pages."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Thread

import pytest

from pdlink.control.frames import Abort, AbortAck, Failed, PageSpan, Ready, Refused, Subscribed
from pdlink.layout.readers import ReaderSet
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.states import SenderState
from tests.prefill.rig import (
    FIRST,
    INCARNATION,
    LEASE_S,
    LIVENESS_S,
    SECOND,
    SOLO,
    STRANGER,
    Rig,
    generations,
    published,
)


def test_pages_are_held_until_every_reader_of_the_set_has_released(rig: Rig) -> None:
    pulled = published(rig, 1, FIRST)
    assert rig.release(1, pulled, FIRST).unchanged
    assert rig.sender.poll() is SenderState.PUBLISHED
    rig.subscribe(2, SECOND)
    late = rig.take(Ready, 2)
    assert generations(late) == pulled
    assert rig.release(2, pulled, SECOND).unchanged
    assert rig.sender.poll() is SenderState.RELEASED


def test_one_reader_that_releases_twice_does_not_stand_for_two(rig: Rig) -> None:
    pulled = published(rig, 1, FIRST)
    assert rig.release(1, pulled, FIRST).unchanged
    assert rig.release(1, pulled, FIRST).unchanged
    assert rig.sender.poll() is SenderState.PUBLISHED


def test_a_reader_of_another_set_is_refused_and_the_first_one_goes_on(rig: Rig) -> None:
    pulled = published(rig)
    rig.subscribe(9, STRANGER)
    (refusal,) = rig.take(Refused, 9)
    assert refusal.cause.reason is FailureReason.DUPLICATE
    assert "'dec' with 1 readers" in refusal.cause.text
    assert "'other' with 1 readers" in refusal.cause.text
    rig.sender.on_abort(b"x", 9, Abort(refusal.cause, STRANGER))
    assert len(rig.take(AbortAck, 9)) == 1
    assert not rig.release(9, pulled, STRANGER).unchanged
    assert rig.release(1, pulled).unchanged
    assert rig.sender.poll() is SenderState.RELEASED


def test_sets_that_disagree_on_their_size_are_refused(rig: Rig) -> None:
    published(rig, 1, FIRST)
    rig.subscribe(2, ReaderSet("dec", 1, 3))
    (refusal,) = rig.take(Refused, 2)
    assert "2 readers" in refusal.cause.text
    assert "3 readers" in refusal.cause.text


def test_a_new_attempt_waits_while_the_old_one_lives_and_takes_over_when_it_is_silent(rig: Rig) -> None:
    published(rig)
    rig.subscribe(2)
    assert rig.take(Subscribed, 2) == [Subscribed(INCARNATION, 0, False)]
    assert rig.take(Ready, 2) == []
    rig.now += 16
    rig.subscribe(2)
    assert [one.sequence for one in rig.take(Ready, 2)] == [0, 1]


def replaced(rig: Rig) -> dict[int, int]:
    """Attempt 2 has taken the place of attempt 1; what both may release."""
    pulled = published(rig)
    rig.now += LIVENESS_S + 1
    rig.subscribe(2)
    assert generations(rig.take(Ready, 2)) == pulled
    return pulled


def test_an_attempt_that_was_replaced_is_never_vouched_for_though_its_pages_are_unchanged(rig: Rig) -> None:
    """What was packed for it has been given to others, so that its bytes may be anybody's."""
    pulled = replaced(rig)
    late = rig.release(1, pulled)
    assert not late.unchanged
    assert late.cause
    assert late.cause.reason is FailureReason.STALE
    assert rig.release(2, pulled).unchanged
    assert rig.sender.poll() is SenderState.RELEASED


def test_an_attempt_that_was_replaced_never_comes_back_though_its_successor_is_silent(rig: Rig) -> None:
    replaced(rig)
    rig.now += LIVENESS_S + 1
    rig.subscribe(1)
    (refusal,) = rig.take(Refused, 1)
    assert refusal.cause.reason is FailureReason.STALE
    assert not rig.sender.is_reading(1)
    assert not rig.sender.must_wait(SOLO, 1)


def test_an_attempt_that_was_replaced_belongs_to_this_request_also_after_its_end(rig: Rig) -> None:
    pulled = replaced(rig)
    rig.sender.on_abort(b"x", 1, Abort(Failure(FailureReason.ABORTED, "enough"), SOLO))
    assert rig.release(2, pulled).unchanged
    assert rig.sender.poll() is SenderState.RELEASED
    assert set(rig.sender.attempts()) == {1, 2}
    assert not rig.sender.is_over_for(SOLO, 1)


def test_a_release_of_somebody_who_never_subscribed_keeps_no_page_alive(rig: Rig) -> None:
    pulled = published(rig)
    rig.now += LEASE_S - 1
    assert not rig.release(9, pulled).unchanged
    assert not rig.release(9, {0: 77}, STRANGER).unchanged
    rig.sender.expire(rig.now + 2)
    assert rig.sender.poll() is SenderState.EXPIRED


def test_a_new_attempt_never_takes_the_place_of_one_that_has_released(rig: Rig) -> None:
    """What is still held for the second reader belongs to the request that the first one has finished."""
    pulled = published(rig, 1, FIRST)
    rig.release(1, pulled, FIRST)
    rig.now += 1000
    rig.subscribe(3, FIRST)
    assert rig.take(Refused) == []
    assert rig.take(Ready, 3) == []
    assert rig.take(Subscribed, 3) == [Subscribed(INCARNATION, 0, False)]
    rig.subscribe(2, SECOND)
    assert rig.release(2, pulled, SECOND).unchanged
    assert rig.sender.poll() is SenderState.RELEASED


def test_an_abort_of_an_attempt_that_was_replaced_or_has_released_is_answered_and_ends_nothing(rig: Rig) -> None:
    cause = Failure(FailureReason.ABORTED, "enough")
    pulled = published(rig, 1, FIRST)
    rig.release(1, pulled, FIRST)
    rig.sender.on_abort(b"x", 1, Abort(cause, FIRST))
    rig.subscribe(2, SECOND)
    rig.sender.on_abort(b"x", 77, Abort(cause, SECOND))
    assert len(rig.take(AbortAck)) == 2
    assert rig.release(2, pulled, SECOND).unchanged
    assert rig.sender.poll() is SenderState.RELEASED


def test_an_abort_of_one_reader_ends_the_request_and_the_other_is_told_why(rig: Rig) -> None:
    published(rig, 1, FIRST)
    rig.subscribe(2, SECOND)
    rig.sender.on_abort(b"x", 1, Abort(Failure(FailureReason.ABORTED, "enough"), FIRST))
    assert rig.sender.poll() is SenderState.ABORTED
    assert [one.cause.text for one in rig.take(Failed, 2)] == ["enough"]
    assert rig.take(Failed, 1) == []


@pytest.mark.parametrize("who", ["engine", "reader"])
@pytest.mark.parametrize("state", ["open", "publishing", "published", "released", "expired"])
def test_an_abort_in_any_state_ends_the_request_and_none_after_the_end_changes_it(who: str, state: str) -> None:
    rig = Rig()
    rig.subscribe(1)
    if state != "open":
        rig.sender.publish([3], last=state != "publishing")
    pulled = generations(rig.take(Ready, 1))
    if state == "released":
        assert rig.release(1, pulled).unchanged
    elif state == "expired":
        rig.sender.expire(rig.now + LEASE_S + 1)
    assert rig.sender.poll().value == state
    if who == "engine":
        rig.sender.abort("enough")
    else:
        rig.sender.on_abort(b"route1", 1, Abort(Failure(FailureReason.ABORTED, "enough"), SOLO))
        assert len(rig.take(AbortAck, 1)) == 1
    ended = state if state in ("released", "expired") else "aborted"
    assert rig.sender.poll().value == ended
    assert not pulled or not rig.release(1, pulled).unchanged
    rig.sender.publish([4], last=True)
    rig.subscribe(1)
    assert rig.take(Ready) == []
    assert rig.sender.poll().value == ended


def test_the_first_wanted_pages_are_told_once_every_reader_has_subscribed(rig: Rig) -> None:
    assert rig.sender.first_pages() is None
    rig.subscribe(1, FIRST, spans=(PageSpan("kv", 4, 2),))
    assert rig.sender.first_pages() is None
    rig.subscribe(2, SECOND, spans=(PageSpan("kv", 3, 3),))
    assert rig.sender.first_pages() == {"kv": 3}


def test_a_stranger_does_not_say_which_pages_are_wanted(rig: Rig) -> None:
    rig.subscribe(1, FIRST, spans=(PageSpan("kv", 4, 2),))
    rig.subscribe(9, STRANGER, spans=(PageSpan("kv", 0, 6),))
    assert rig.sender.first_pages() is None


def test_attempts_are_read_under_the_lock_under_which_they_change() -> None:
    rig = Rig()
    rig.subscribe(1)
    asked: Future[tuple[int, ...]] = Future()
    thread = Thread(target=lambda: asked.set_result(rig.sender.attempts()))
    with rig.sender._lock:
        thread.start()
        with pytest.raises(TimeoutError):
            asked.result(0.2)
    assert asked.result(60.0) == (1,)
    thread.join(60.0)
