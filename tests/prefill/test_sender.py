"""One request on one prefill rank, driven by hand: what is published, what readers are told, and how it ends."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from threading import Thread

import pytest

from pdlink.control.frames import Abort, AbortAck, Failed, PageSpan, Ready, Refused, Subscribed, Verdict
from pdlink.errors import InvalidInput, StateError, TransferFailed
from pdlink.layout.readers import ReaderSet
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.states import SenderState
from tests.prefill.rig import INCARNATION, LEASE_S, LIVENESS_S, NUM_PAGES, SOLO, Rig, facts

FIRST, SECOND = ReaderSet("dec", 0, 2), ReaderSet("dec", 1, 2)
STRANGER = ReaderSet("other", 0, 1)


def generations(frames: list[Ready]) -> dict[int, int]:
    return {one.sequence: one.generation for one in frames}


@pytest.fixture
def rig() -> Rig:
    return Rig()


def published(rig: Rig, attempt: int = 1, readers: ReaderSet = SOLO) -> dict[int, int]:
    """Subscribe, publish two chunks, and return what the reader would release."""
    rig.subscribe(attempt, readers)
    rig.sender.publish([3, 1])
    rig.sender.publish([2], last=True, aux=b"tok")
    return generations(rig.take(Ready, attempt))


def test_pages_follow_each_other_and_the_last_carries_the_aux(rig: Rig) -> None:
    rig.subscribe(1)
    rig.sender.publish([3, 1])
    rig.sender.publish([2], last=True, aux=b"tok")
    first, last = rig.take(Ready)
    assert (first.sequence, first.start_page, first.page_ids.tolist(), first.last, first.aux) == (
        0,
        0,
        [3, 1],
        False,
        None,
    )
    assert (last.sequence, last.start_page, last.page_ids.tolist(), last.last, last.aux) == (1, 2, [2], True, b"tok")
    assert first.layers == {"latent": (0, 1), "index_k": (0, 1)}


def test_a_reader_that_comes_late_is_sent_everything(rig: Rig) -> None:
    rig.sender.publish([3, 1])
    rig.sender.publish([2], last=True)
    rig.subscribe(1)
    assert [one.sequence for one in rig.take(Ready)] == [0, 1]


def test_a_repeated_subscribe_fills_the_gap_it_names(rig: Rig) -> None:
    published(rig)
    rig.subscribe(1, next_sequence=1)
    assert [one.sequence for one in rig.take(Ready)] == [1]


def test_a_subscribe_from_beyond_the_end_hides_nothing_that_is_published_later(rig: Rig) -> None:
    rig.subscribe(1, next_sequence=1000)
    rig.sender.publish([3])
    assert [one.sequence for one in rig.take(Ready)] == [0]


def test_a_rank_that_is_not_elected_keeps_its_aux() -> None:
    rig = Rig(facts(is_aux_owner=False))
    rig.subscribe(1)
    rig.sender.publish([3], last=True, aux=b"tok")
    (last,) = rig.take(Ready)
    assert (last.last, last.aux) == (True, None)


def test_a_rank_that_owns_nothing_publishes_its_end(rig: Rig) -> None:
    rig = Rig(facts({}, is_aux_owner=False))
    rig.subscribe(1)
    rig.sender.publish([3, 4], last=True)
    (last,) = rig.take(Ready)
    assert (last.last, dict(last.layers)) == (True, {})
    assert rig.release(1, generations([last])).unchanged
    assert rig.sender.poll() is SenderState.RELEASED


@pytest.mark.parametrize("start_page", [-1, 1 << 31, 1 << 40])
def test_a_page_position_that_no_frame_can_carry_is_refused_before_anything_is_recorded(
    rig: Rig, start_page: int
) -> None:
    rig.subscribe(1)
    with pytest.raises(InvalidInput, match="page positions"):
        rig.sender.publish([3], start_page=start_page)
    rig.sender.publish([3])
    assert [one.start_page for one in rig.take(Ready)] == [0]


@pytest.mark.parametrize("page", [-1, NUM_PAGES])
@pytest.mark.parametrize("owned", [{"latent": (0,)}, {}], ids=["owner", "owns-nothing"])
def test_a_page_outside_the_pool_is_refused(page: int, owned: dict[str, tuple[int, ...]]) -> None:
    rig = Rig(facts(owned))
    if page >= 0 and not owned:
        page = 1 << 31
    with pytest.raises(InvalidInput, match="publishes pages"):
        rig.sender.publish([page])
    assert rig.sender.poll() is SenderState.OPEN


def test_a_layer_of_another_rank_is_refused_by_name(rig: Rig) -> None:
    with pytest.raises(InvalidInput, match=r"'latent' layers \[2\].*owns \[0, 1\]"):
        rig.sender.publish([1], layers={"latent": [1, 2]})


def test_a_layer_named_twice_is_published_once(rig: Rig) -> None:
    rig.subscribe(1)
    rig.sender.publish([1], layers={"latent": [1, 0, 1]})
    assert [dict(one.layers) for one in rig.take(Ready)] == [{"latent": (0, 1)}]


def test_many_pages_are_cut_into_frames_that_end_once() -> None:
    many = list(range(9000 * NUM_PAGES))
    large = {cell: replace(region, num_pages=len(many)) for cell, region in facts().regions.items()}
    rig = Rig(replace(facts(), regions=large))
    rig.subscribe(1)
    rig.sender.publish(many, last=True, aux=b"tok")
    frames = rig.take(Ready)
    assert len(frames) == 3
    assert [one.sequence for one in frames] == [0, 1, 2]
    assert [one.start_page for one in frames] == [0, 65536, 131072]
    assert [page for one in frames for page in one.page_ids.tolist()] == many
    assert [(one.last, one.aux) for one in frames] == [(False, None), (False, None), (True, b"tok")]


def test_a_page_is_published_once(rig: Rig) -> None:
    rig.sender.publish([1, 2], layers={"latent": [0]}, start_page=0)
    rig.sender.publish([1, 2], layers={"latent": [1]}, start_page=0)
    with pytest.raises(StateError, match=r"'latent' layer 0: pages \[1, 2\)"):
        rig.sender.publish([5], layers={"latent": [0]}, start_page=1)


@pytest.mark.parametrize(
    ("before", "pages", "start", "said"),
    [
        ([], [3, 9, 3], 0, "page 3 of group 'kv' is given for two positions"),
        ([3, 9], [4, 3], 2, "page 3 of group 'kv' holds position 0 .* given for position 3"),
        ([3, 9], [9], 2, "page 9 of group 'kv' holds position 1 .* given for position 2"),
    ],
)
def test_a_page_holds_one_position_of_a_request(
    rig: Rig, before: list[int], pages: list[int], start: int, said: str
) -> None:
    rig.sender.publish(before)
    with pytest.raises(StateError, match=said):
        rig.sender.publish(pages, start_page=start)
    rig.sender.publish([5, 6], start_page=len(before))  # nothing was recorded of what was refused


def test_layers_of_one_position_are_published_one_after_the_other_from_the_same_page(rig: Rig) -> None:
    rig.sender.publish([3, 9], layers={"latent": [0]})
    rig.sender.publish([3, 9], start_page=0, layers={"latent": [1], "index_k": [0, 1]})
    with pytest.raises(StateError, match="published already"):
        rig.sender.publish([3], start_page=0, layers={"latent": [1]})


def test_nothing_is_published_after_the_last(rig: Rig) -> None:
    rig.sender.publish([1], last=True)
    with pytest.raises(StateError, match="to its end"):
        rig.sender.publish([2])


def test_aux_that_is_early_or_too_long_is_refused(rig: Rig) -> None:
    with pytest.raises(InvalidInput, match="last publish"):
        rig.sender.publish([1], aux=b"x")
    with pytest.raises(InvalidInput, match="over the limit"):
        rig.sender.publish([1], last=True, aux=bytes((64 << 10) + 1))


# --- the end ---------------------------------------------------------------------------------------


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


# --- readers ---------------------------------------------------------------------------------------


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
