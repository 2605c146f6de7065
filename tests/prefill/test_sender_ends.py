"""How one request on one prefill rank ends: released, withdrawn, aborted or expired, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdlink.control.frames import Abort, Failed, Ready, Refused, Verdict
from pdlink.errors import TransferFailed
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.states import SenderState
from tests.prefill.rig import (
    FIRST,
    LEASE_S,
    LIVENESS_S,
    SECOND,
    SOLO,
    STRANGER,
    Rig,
    facts,
    generations,
    published,
)


def test_a_release_of_what_is_published_ends_the_request_and_moves_every_generation_on(rig: Rig) -> None:
    pulled = published(rig)
    assert rig.release(1, pulled).unchanged
    assert rig.sender.poll() is SenderState.RELEASED
    late = rig.release(2, pulled)
    assert not late.unchanged
    assert late.cause
    assert late.cause.reason is FailureReason.GENERATION


def test_a_release_before_the_last_publish_waits_for_it(rig: Rig) -> None:
    rig.subscribe(1)
    rig.sender.publish([3])
    assert rig.release(1, generations(rig.take(Ready))).unchanged
    assert rig.sender.poll() is SenderState.PUBLISHING
    rig.sender.publish([4], last=True)
    assert rig.sender.poll() is SenderState.RELEASED


@pytest.mark.parametrize("take_back", ["withdraw", "abort", "expire"])
def test_pages_taken_back_are_denied_to_a_reader_that_comes_later(rig: Rig, take_back: str) -> None:
    pulled = published(rig)
    if take_back == "withdraw":
        rig.sender.withdraw([1])
    elif take_back == "abort":
        rig.sender.abort()
    else:
        rig.sender.expire(rig.now + LEASE_S + 1)
    assert rig.sender.poll().is_final
    assert len(rig.take(Failed, 1)) == 1
    verdict = rig.release(1, pulled)
    assert not verdict.unchanged
    with pytest.raises(TransferFailed):
        rig.sender.raise_failure()


def test_generations_move_before_the_engine_can_see_the_end(rig: Rig) -> None:
    """Whoever sees a final state may reuse the pages, so by then every verdict about them must be no."""
    pulled = published(rig)
    seen = []

    def look(body: object) -> None:
        if isinstance(body, Failed):
            # The frame leaves between the two steps: the state is not final, the generations have moved.
            assert not rig.sender.poll().is_final
            seen.append(rig.release(1, pulled).unchanged)

    rig.on_send = look
    rig.sender.abort()
    assert seen == [False]


def test_withdrawing_pages_that_were_never_published_changes_nothing(rig: Rig) -> None:
    pulled = published(rig)
    rig.sender.withdraw([9, 10])
    assert rig.release(1, pulled).unchanged


def test_withdrawing_pages_of_another_group_changes_nothing(rig: Rig) -> None:
    pulled = published(rig)
    rig.sender.withdraw([1], group="state")
    assert rig.release(1, pulled).unchanged


def test_pages_expire_when_nobody_comes_and_not_while_a_reader_shows_itself() -> None:
    rig = Rig(replace(facts(), liveness_s=1000.0))
    published(rig)
    for _ in range(5):
        rig.now += LEASE_S * 0.9
        rig.subscribe(1, next_sequence=2)
        rig.sender.expire(rig.now)
        assert rig.sender.poll() is SenderState.PUBLISHED
    rig.sender.expire(rig.now + LEASE_S)
    assert rig.sender.poll() is SenderState.PUBLISHED
    rig.sender.expire(rig.now + LEASE_S + 0.1)
    assert rig.sender.poll() is SenderState.EXPIRED
    assert rig.sender.failure
    assert "PDLINK_PUBLICATION_LEASE_S" in str(rig.sender.failure)


def test_a_reader_that_falls_silent_ends_the_request_long_before_the_lease(rig: Rig) -> None:
    pulled = published(rig, 1, FIRST)
    rig.subscribe(2, SECOND)
    rig.take(Failed)
    for _ in range(4):
        rig.now += LIVENESS_S / 3
        rig.subscribe(2, SECOND, next_sequence=2)
        rig.sender.expire(rig.now)
    assert rig.sender.poll() is SenderState.EXPIRED
    assert rig.sender.failure
    assert rig.sender.failure.reason is FailureReason.PEER_GONE
    assert "reader 0 of 'dec' has not been heard for 20.0 s" in str(rig.sender.failure)
    assert "PDLINK_LIVENESS_TIMEOUT_S" in str(rig.sender.failure)
    assert len(rig.take(Failed, 2)) == 1
    assert not rig.release(1, pulled, FIRST).unchanged


def test_a_reader_that_is_through_may_be_silent(rig: Rig) -> None:
    pulled = published(rig, 1, FIRST)
    rig.release(1, pulled, FIRST)
    rig.now += LIVENESS_S + 1
    rig.sender.expire(rig.now)
    assert rig.sender.poll() is SenderState.PUBLISHED


def test_while_this_process_did_not_listen_nobody_was_silent(rig: Rig) -> None:
    published(rig)
    rig.now += LIVENESS_S + 1
    rig.sender.expire(rig.now, awake_since=rig.now - 1)
    assert rig.sender.poll() is SenderState.PUBLISHED
    rig.sender.expire(rig.now + LIVENESS_S, awake_since=rig.now - 1)
    assert rig.sender.poll() is SenderState.EXPIRED


def test_a_silent_reader_whose_place_another_attempt_wants_ends_nothing(rig: Rig) -> None:
    published(rig)
    for _ in range(5):
        rig.now += LIVENESS_S / 4
        rig.subscribe(2)
        rig.sender.expire(rig.now)
    assert rig.sender.poll() is SenderState.PUBLISHED
    assert [one.sequence for one in rig.take(Ready, 2)] == [0, 1]


def test_a_request_that_has_published_nothing_holds_nothing_and_does_not_expire(rig: Rig) -> None:
    rig.sender.expire(rig.now + 100 * LEASE_S)
    assert rig.sender.poll() is SenderState.OPEN


def test_a_refused_stranger_does_not_keep_pages_alive(rig: Rig) -> None:
    published(rig)
    rig.now += LEASE_S
    rig.subscribe(9, STRANGER)
    rig.sender.expire(rig.now + 1)
    assert rig.sender.poll() is SenderState.EXPIRED


def test_after_the_end_publishing_does_nothing(rig: Rig) -> None:
    rig.subscribe(1)
    rig.sender.abort()
    rig.sender.publish([3], last=True)
    assert rig.take(Ready) == []
    assert rig.sender.poll() is SenderState.ABORTED


def test_the_first_cause_is_kept(rig: Rig) -> None:
    published(rig)
    rig.sender.fail(Failure(FailureReason.BACKEND, "first"))
    rig.sender.abort("second")
    rig.sender.withdraw([1])
    assert rig.sender.failure
    assert rig.sender.failure.text == "first"


def test_a_reader_that_comes_after_the_end_is_told_how_it_ended(rig: Rig) -> None:
    rig.sender.publish([1])
    rig.sender.abort("engine says no")
    rig.subscribe(1)
    (refusal,) = rig.take(Refused, 1)
    assert refusal.cause.text == "engine says no"


def test_verdicts_name_the_publication_that_changed(rig: Rig) -> None:
    pulled = published(rig)
    verdict = rig.release(1, pulled | {1: pulled[1] + 1})
    assert not verdict.unchanged
    assert verdict.cause
    assert "publication 1" in verdict.cause.text
    assert rig.take(Verdict, 1) == [verdict]


def test_a_release_of_something_never_published_is_denied(rig: Rig) -> None:
    published(rig)
    assert not rig.release(1, {5: 1}).unchanged


def ended(rig: Rig, caplog: pytest.LogCaptureFixture) -> Failure:
    """The failure of a request that has ended badly, which is in the log too."""
    assert rig.sender.failure
    (line,) = [one.message for one in caplog.records if one.levelname == "WARNING"]
    assert line == f"transfer t {rig.sender.poll()}: {rig.sender.failure}"
    return rig.sender.failure


def test_pages_that_nobody_came_for_are_told_of_with_what_to_do(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.sender.publish([4], last=True)
    rig.sender.expire(rig.now + LEASE_S + 1)
    cause = ended(rig, caplog)
    assert cause.reason is FailureReason.EXPIRED
    assert "nobody has asked for the published pages" in cause.text
    assert "PDLINK_PUBLICATION_LEASE_S" in cause.fix


def test_an_abort_is_told_of_by_the_decode_instance_that_it_came_from(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.subscribe(1)
    rig.sender.on_abort(b"route1", 1, Abort(Failure(FailureReason.ABORTED, "enough"), SOLO))
    cause = ended(rig, caplog)
    assert cause.text == "enough"
    assert cause.worker_id == SOLO.decode_instance


@pytest.mark.parametrize(
    ("lease_s", "liveness_s", "setting"), [(30.0, 15.0, "LIVENESS_TIMEOUT"), (5.0, 15.0, "PUBLICATION_LEASE")]
)
def test_a_silent_reader_is_told_of_by_the_limit_that_it_has_passed(lease_s, liveness_s, setting) -> None:
    rig = Rig(replace(facts(), lease_s=lease_s, liveness_s=liveness_s))
    rig.subscribe(1)
    rig.sender.expire(rig.now + min(lease_s, liveness_s) + 1)
    assert rig.sender.failure
    assert f"PDLINK_{setting}_S" in rig.sender.failure.fix


def test_a_success_is_no_warning(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pdlink.prefill")
    published(rig)
    rig.release(1, {})
    assert [(one.levelname, one.message) for one in caplog.records] == [
        ("INFO", "transfer t released: 302592 bytes published for dec in 0.0 ms, 0.00 GB/s")
    ]
