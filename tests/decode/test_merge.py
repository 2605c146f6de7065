"""What a merge decides, step by step: whom it asks, when it gives up, what it says and to whom."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pdlink.config import Settings, load_settings
from pdlink.control.frames import Abort, Ready, Release, Subscribed
from pdlink.decode.actions import Pull, Resubscribe, StopPulls
from pdlink.transfer.digests import DigestTable, cells_in_order
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.states import ReceiverState
from tests.decode.rig import INCARNATION, Wait, make_layout, make_plan, make_request, ready

LAYOUT = make_layout(2)
PLAN, OWNED = make_plan(LAYOUT, 2)
EVERYONE = {"r0", "r1"}
SETTINGS = load_settings({})


def start(*, expect_aux: bool = False, pages: tuple[int, ...] = (5, 7), first_page: int = 0, **more: object) -> Wait:
    settings: Settings = load_settings({}, **more)
    return Wait(make_request(LAYOUT, pages, first_page, expect_aux), PLAN, settings).resolve()


def publish(wait: Wait, worker_id: str, *, aux: bytes | None = b"tok") -> None:
    wait.merge.on_ready(worker_id, ready(0, [1, 2], OWNED[worker_id], last=True, aux=aux), wait.now)


def land(wait: Wait, failure: Failure | None = None) -> None:
    for pull in wait.take(Pull):
        wait.merge.on_pulled(pull.worker_id, pull.ticket, failure, wait.now)


def confirming() -> Wait:
    wait = start()
    for worker_id in sorted(EVERYONE):
        publish(wait, worker_id)
    land(wait)
    assert wait.merge.state is ReceiverState.CONFIRMING
    return wait


def test_every_rank_is_asked_and_the_unanswered_ones_again() -> None:
    wait = start()
    assert {one.worker_id for one in wait.take(Resubscribe)} == EVERYONE
    wait.merge.on_subscribed("r0", Subscribed(INCARNATION, 0, False), wait.now)
    wait.tick(SETTINGS.resend_interval_s)
    assert {one.worker_id for one in wait.take(Resubscribe)} == {"r1"}
    wait.tick(SETTINGS.keepalive_interval_s)
    assert {one.worker_id for one in wait.take(Resubscribe)} == EVERYONE


def test_a_gap_is_asked_for_from_the_frame_that_is_missing() -> None:
    wait = start()
    wait.take(Resubscribe)
    wait.merge.on_ready("r0", ready(0, [1], OWNED["r0"]), wait.now)
    wait.merge.on_ready("r0", ready(2, [3], OWNED["r0"], start_page=2), wait.now)
    wait.tick(SETTINGS.resend_interval_s)
    assert Resubscribe("r0", 1) in wait.take(Resubscribe)
    wait.merge.on_ready("r0", ready(1, [2], OWNED["r0"], start_page=1), wait.now)
    wait.tick(SETTINGS.resend_interval_s)
    assert "r0" not in {one.worker_id for one in wait.take(Resubscribe)}


def test_frames_counted_without_ranks_do_not_complete_a_request() -> None:
    """Three ranks, two chunks each: rank 0's frames twice and rank 1's once are not the six that are wanted."""
    layout = make_layout(3)
    plan, owned = make_plan(layout, 3)
    wait = Wait(make_request(layout, [5, 7]), plan, SETTINGS).resolve()
    chunks = {
        name: [ready(0, [1], cells), ready(1, [2], cells, start_page=1, last=True)] for name, cells in owned.items()
    }
    for name in ("r0", "r0", "r1", "r0"):
        for frame in chunks[name]:
            wait.merge.on_ready(name, frame, wait.now)
        land(wait)
    assert wait.merge.state is ReceiverState.PULLING
    for frame in chunks["r2"]:
        wait.merge.on_ready("r2", frame, wait.now)
    assert wait.merge.state is ReceiverState.PULLING
    land(wait)
    assert wait.merge.state is ReceiverState.CONFIRMING
    assert wait.sent(Release) == {
        name: Release(wait.merge.request.readers, {0: 100, 1: 101}) for name in ("r0", "r1", "r2")
    }


def test_success_needs_a_yes_of_every_owner() -> None:
    wait = confirming()
    wait.merge.on_verdict("r0", True, None, wait.now)
    wait.merge.on_verdict("r0", True, None, wait.now)
    assert wait.merge.state is ReceiverState.CONFIRMING
    wait.merge.on_verdict("r1", True, None, wait.now)
    assert wait.merge.state is ReceiverState.DONE
    assert wait.merge.aux == b"tok"
    assert wait.merge.is_settled


def test_a_rank_that_has_vouched_cannot_take_it_back_when_it_is_asked_again() -> None:
    """It may have forgotten the request by then: the repeat was on its way while its answer was."""
    wait = confirming()
    wait.merge.on_verdict("r1", True, None, wait.now)
    wait.merge.on_verdict("r1", False, Failure(FailureReason.STALE, "unknown here", "r1"), wait.now)
    wait.merge.on_refused("r1", Failure(FailureReason.STALE, "unknown here", "r1"), wait.now)
    assert wait.merge.state is ReceiverState.CONFIRMING
    wait.merge.on_verdict("r0", True, None, wait.now)
    assert wait.merge.state is ReceiverState.DONE


def test_a_no_without_a_cause_fails_all_the_same() -> None:
    wait = confirming()
    wait.merge.on_verdict("r0", False, None, wait.now)
    wait.merge.on_verdict("r1", True, None, wait.now)
    assert wait.merge.state is ReceiverState.FAILED
    assert wait.merge.failure
    assert (wait.merge.failure.reason, wait.merge.failure.worker_id) == (FailureReason.GENERATION, "r0")


def test_a_release_without_an_answer_is_repeated_and_then_given_up_by_name() -> None:
    wait = confirming()
    assert set(wait.sent(Release)) == EVERYONE
    wait.merge.on_verdict("r0", True, None, wait.now)
    wait.tick(SETTINGS.resend_interval_s)
    assert set(wait.sent(Release)) == {"r1"}
    wait.tick(SETTINGS.confirm_timeout_s)
    assert wait.merge.state is ReceiverState.DRAINING
    assert wait.merge.failure
    assert wait.merge.failure.worker_id == "r1"
    assert "still waiting for r1" in wait.merge.failure.text
    assert "PDLINK_CONFIRM_TIMEOUT_S" in wait.merge.failure.fix


def test_an_answer_to_a_release_that_was_never_sent_means_nothing() -> None:
    wait = start()
    wait.merge.on_verdict("r0", True, None, wait.now)
    wait.merge.on_verdict("r1", False, None, wait.now)
    assert wait.merge.state is ReceiverState.SUBSCRIBED
    wait.merge.fail(Failure(FailureReason.ABORTED, "enough"), wait.now)
    assert set(wait.sent(Abort)) == EVERYONE


def test_an_acknowledged_abort_that_was_never_sent_means_nothing() -> None:
    wait = start()
    wait.merge.on_abort_ack("r0", wait.now)
    wait.merge.fail(Failure(FailureReason.ABORTED, "enough"), wait.now)
    assert set(wait.sent(Abort)) == EVERYONE


def test_the_first_failure_stays_and_the_others_are_cancelled() -> None:
    wait = start()
    publish(wait, "r0")
    publish(wait, "r1")
    first, second = wait.take(Pull)
    wait.merge.on_pulled(first.worker_id, first.ticket, Failure(FailureReason.BACKEND, "first"), wait.now)
    assert wait.take(StopPulls) == [StopPulls((second.worker_id,))]
    wait.merge.on_pulled(second.worker_id, second.ticket, Failure(FailureReason.BACKEND, "second"), wait.now)
    assert wait.merge.failure
    assert wait.merge.failure.text == "first"
    assert {body.cause.text for body in wait.sent(Abort).values()} == {"first"}


def test_a_pull_that_is_failing_stops_the_others_and_holds_the_end() -> None:
    wait = start()
    publish(wait, "r0")
    (pull,) = wait.take(Pull)
    wait.merge.on_pull_failing("r0", Failure(FailureReason.BACKEND, "broken"), wait.now)
    assert set(wait.sent(Abort)) == EVERYONE
    for worker_id in EVERYONE:
        wait.merge.on_abort_ack(worker_id, wait.now)
    wait.tick(1000)
    assert wait.merge.state is ReceiverState.DRAINING
    wait.merge.on_pulled("r0", pull.ticket, Failure(FailureReason.BACKEND, "broken"), wait.now)
    assert wait.merge.state is ReceiverState.FAILED


def test_nothing_is_reported_while_a_pull_may_still_land() -> None:
    wait = start()
    publish(wait, "r0")
    (pull,) = wait.take(Pull)
    wait.merge.fail(Failure(FailureReason.ABORTED, "enough"), wait.now)
    wait.tick(1000)
    assert wait.merge.state is ReceiverState.DRAINING
    wait.merge.on_pulled("r0", pull.ticket, None, wait.now)
    assert wait.merge.state is ReceiverState.ABORTED


ENOUGH = Failure(FailureReason.ABORTED, "enough")


def test_an_abort_in_any_state_ends_the_request_once_and_posts_nothing_more() -> None:
    subscribed, pulling, confirms = start(), start(), confirming()
    publish(pulling, "r0")
    pulls = pulling.take(Pull)
    confirms.merge.on_verdict("r0", True, None, confirms.now)
    for wait in (subscribed, pulling, confirms):
        state = wait.merge.state
        wait.merge.fail(ENOUGH, wait.now)
        assert wait.merge.state is ReceiverState.DRAINING, state
        asked = set(wait.sent(Abort))
        assert asked == (EVERYONE if wait is not confirms else {"r1"}), state
        publish(wait, "r1")
        assert wait.take(Pull) == [], state
        for pull in pulls if wait is pulling else ():
            assert not wait.merge.state.is_final
            wait.merge.on_pulled(pull.worker_id, pull.ticket, None, wait.now)
        for worker_id in asked:
            wait.merge.on_abort_ack(worker_id, wait.now)
        assert wait.merge.state is ReceiverState.ABORTED, state
        assert wait.merge.is_settled


def test_verdicts_that_come_after_an_abort_make_no_success() -> None:
    wait = confirming()
    wait.merge.on_verdict("r0", True, None, wait.now)
    wait.merge.fail(ENOUGH, wait.now)
    wait.merge.on_verdict("r1", True, None, wait.now)
    wait.merge.on_verdict("r0", True, None, wait.now)
    assert wait.merge.state is ReceiverState.ABORTED


@pytest.mark.parametrize("end", ["done", "failed", "aborted"])
def test_an_abort_after_the_end_changes_nothing_and_tells_nobody(end: str) -> None:
    wait = confirming()
    for worker_id in sorted(EVERYONE):
        if end == "aborted":
            wait.merge.fail(Failure(FailureReason.ABORTED, "first"), wait.now)
        wait.merge.on_verdict(worker_id, end == "done", None, wait.now)
    before = (wait.merge.state, wait.merge.failure)
    assert wait.merge.state.value == end
    wait.sent(Abort)
    wait.merge.fail(ENOUGH, wait.now)
    assert (wait.merge.state, wait.merge.failure) == before
    assert wait.sent(Abort) == {}


def test_an_abort_is_repeated_for_a_while_after_the_end_and_then_no_more() -> None:
    wait = start()
    wait.merge.fail(Failure(FailureReason.ABORTED, "enough"), wait.now)
    wait.merge.on_abort_ack("r0", wait.now)
    wait.sent(Abort)
    wait.tick(SETTINGS.abort_ack_timeout_s)
    assert wait.merge.state is ReceiverState.ABORTED
    assert set(wait.sent(Abort)) == {"r1"}
    wait.tick(SETTINGS.resend_interval_s)
    assert set(wait.sent(Abort)) == {"r1"}
    assert not wait.merge.is_settled
    wait.tick(SETTINGS.confirm_timeout_s + 1)
    assert wait.merge.is_settled
    assert wait.sent(Abort) == {}


def test_an_abort_before_the_owners_are_known_is_told_to_them_when_they_are() -> None:
    wait = Wait(make_request(LAYOUT, [5]), PLAN, SETTINGS)
    wait.merge.fail(Failure(FailureReason.ABORTED, "enough"), wait.now)
    assert wait.merge.state is ReceiverState.ABORTED
    assert not wait.merge.is_settled
    wait.resolve()
    assert set(wait.sent(Abort)) == EVERYONE
    assert wait.take(Resubscribe) == []
    for worker_id in EVERYONE:
        wait.merge.on_abort_ack(worker_id, wait.now)
    assert wait.merge.is_settled


def test_an_abort_before_owners_that_never_come_is_settled_then() -> None:
    wait = Wait(make_request(LAYOUT, [5]), PLAN, SETTINGS)
    wait.merge.fail(Failure(FailureReason.ABORTED, "enough"), wait.now)
    wait.merge.on_unresolved(Failure(FailureReason.NOT_READY, "nobody"), wait.now)
    assert wait.merge.is_settled
    assert wait.merge.failure
    assert wait.merge.failure.text == "enough"


def test_nothing_to_move_is_done_at_once_and_the_owners_are_told_until_they_answer() -> None:
    wait = start(pages=(), first_page=2)
    assert wait.merge.state is ReceiverState.DONE
    assert set(wait.sent(Release)) == EVERYONE
    wait.merge.fail(Failure(FailureReason.ABORTED, "too late"), wait.now)
    assert wait.merge.state is ReceiverState.DONE
    assert wait.merge.failure is None
    wait.merge.on_verdict("r0", True, None, wait.now)
    wait.tick(SETTINGS.resend_interval_s)
    assert set(wait.sent(Release)) == {"r1"}
    wait.merge.on_verdict("r1", False, None, wait.now)
    assert wait.merge.state is ReceiverState.DONE
    assert wait.merge.is_settled


def test_a_process_that_was_replaced_fails_a_request_that_still_needs_it() -> None:
    wait = start()
    wait.merge.on_incarnation("r1", INCARNATION, wait.now)
    assert wait.merge.state is ReceiverState.SUBSCRIBED
    wait.merge.on_incarnation("r1", INCARNATION + 1, wait.now)
    assert wait.merge.failure
    assert wait.merge.failure.reason is FailureReason.STALE
    assert set(wait.sent(Abort)) == {"r0"}


def test_a_process_that_was_replaced_after_its_yes_is_not_needed_any_more() -> None:
    wait = confirming()
    wait.merge.on_verdict("r1", True, None, wait.now)
    wait.merge.on_incarnation("r1", INCARNATION + 1, wait.now)
    wait.merge.on_subscribed("r1", Subscribed(INCARNATION + 1, 0, True), wait.now)
    wait.merge.on_verdict("r0", True, None, wait.now)
    assert wait.merge.state is ReceiverState.DONE


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("subscribe_timeout_s", FailureReason.TIMEOUT),
        ("liveness_timeout_s", FailureReason.PEER_GONE),
        ("progress_timeout_s", FailureReason.TIMEOUT),
        ("transfer_timeout_s", FailureReason.TIMEOUT),
    ],
)
def test_each_wait_ends_by_its_own_setting_and_names_the_rank(setting: str, reason: FailureReason) -> None:
    waits = ("subscribe_timeout_s", "liveness_timeout_s", "progress_timeout_s", "transfer_timeout_s")
    limits: dict[str, object] = {name: 7.0 if name == setting else 80_000.0 for name in waits}
    wait = start(**limits)
    publish(wait, "r0")
    land(wait)
    if setting != "subscribe_timeout_s":
        wait.merge.on_subscribed("r1", Subscribed(INCARNATION, 0, True), wait.now)
    wait.tick(6.9)
    assert wait.merge.failure is None
    if setting == "liveness_timeout_s":
        wait.merge.on_subscribed("r0", Subscribed(INCARNATION, 0, True), wait.now)
    wait.tick(0.2)
    assert wait.merge.failure
    assert wait.merge.failure.reason is reason
    assert wait.merge.failure.worker_id == "r1"


@pytest.mark.parametrize(
    ("is_open", "named", "text"),
    [
        ({"r0": True, "r1": False}, "r1", "r0 (begun), r1 (its engine has not begun)"),
        ({"r0": True, "r1": True}, "r0", "r0 (begun), r1 (begun)"),
    ],
)
def test_a_request_of_which_no_page_comes_ends_by_a_setting_of_its_own_and_says_who_has_not_begun(
    is_open: dict[str, bool], named: str, text: str
) -> None:
    wait = start(first_page_timeout_s=40.0)
    for _ in range(5):
        for worker_id, begun in is_open.items():
            wait.merge.on_subscribed(worker_id, Subscribed(INCARNATION, 0, begun), wait.now)
        assert wait.merge.failure is None
        wait.tick(8.1)
    assert wait.merge.failure
    assert (wait.merge.failure.reason, wait.merge.failure.worker_id) == (FailureReason.TIMEOUT, named)
    assert f"no page was published for 40 s by {text}" in str(wait.merge.failure)
    assert "PDLINK_FIRST_PAGE_TIMEOUT_S" in str(wait.merge.failure)


def test_after_the_first_page_of_any_rank_its_pauses_count_and_a_rank_that_published_nothing_is_named() -> None:
    wait = start(first_page_timeout_s=10.0, progress_timeout_s=60.0, liveness_timeout_s=80_000.0)
    wait.merge.on_subscribed("r1", Subscribed(INCARNATION, 0, True), wait.now)
    wait.merge.on_ready("r0", ready(0, [7], OWNED["r0"], start_page=0), wait.now)
    land(wait)
    wait.tick(59.0)
    assert wait.merge.failure is None
    wait.tick(2.0)
    assert wait.merge.failure
    assert wait.merge.failure.worker_id == "r1"
    assert "still waiting for r1 (nothing published), r0" in str(wait.merge.failure)


def test_a_receiver_shows_itself_in_time_whatever_its_interval_is_set_to() -> None:
    wait = start(keepalive_interval_s=1000.0, liveness_timeout_s=15.0)
    for worker_id in ("r0", "r1"):
        wait.merge.on_subscribed(worker_id, Subscribed(INCARNATION, 0, True), wait.now)
    wait.take(Resubscribe)
    wait.tick(4.9)
    assert wait.take(Resubscribe) == []
    wait.tick(0.2)
    assert {one.worker_id for one in wait.take(Resubscribe)} == {"r0", "r1"}


def test_what_was_not_heard_while_this_process_stood_still_was_no_silence() -> None:
    wait = start(subscribe_timeout_s=80_000.0)
    wait.merge.excuse(20.0)
    wait.tick(21.0)
    assert wait.merge.failure is None
    wait.tick(15.0)
    assert wait.merge.failure
    assert wait.merge.failure.reason is FailureReason.PEER_GONE


def test_a_rank_that_does_not_answer_is_not_given_more_time_by_another_that_publishes() -> None:
    wait = start(liveness_timeout_s=80_000.0)
    wait.tick(SETTINGS.subscribe_timeout_s - 0.1)
    publish(wait, "r0")
    wait.tick(0.2)
    assert wait.merge.failure
    assert wait.merge.failure.worker_id == "r1"


def test_pages_beyond_what_was_asked_for_are_left_alone() -> None:
    wait = start(pages=(5,), first_page=1)
    wait.merge.on_ready("r0", ready(0, [10, 11, 12], OWNED["r0"]), wait.now)
    (pull,) = wait.take(Pull)
    (move,) = pull.batch.moves
    assert move.runs.source_pages().tolist() == [11]
    assert move.runs.destination_pages().tolist() == [5]


def test_a_layer_that_its_publisher_does_not_own_fails_the_request() -> None:
    wait = start()
    wait.merge.on_ready("r0", ready(0, [1, 2], {"latent": (1,)}), wait.now)
    assert wait.merge.failure
    assert wait.merge.failure.reason is FailureReason.PLAN
    assert "'latent' layer 1" in wait.merge.failure.text
    assert wait.take(Pull) == []


def test_pages_published_twice_fail_the_request() -> None:
    wait = start()
    wait.merge.on_ready("r0", ready(0, [1], OWNED["r0"]), wait.now)
    wait.merge.on_ready("r0", ready(1, [2], OWNED["r0"]), wait.now)
    assert wait.merge.failure
    assert "published twice" in wait.merge.failure.text


def test_a_source_page_outside_its_region_is_never_pulled() -> None:
    wait = start()
    wait.merge.on_ready("r0", ready(0, [1, 10_000], OWNED["r0"]), wait.now)
    assert wait.merge.failure
    assert "10000" in wait.merge.failure.text
    assert wait.take(Pull) == []


def test_aux_of_a_rank_that_was_not_elected_is_not_taken() -> None:
    wait = start(expect_aux=True)
    publish(wait, "r0", aux=b"wrong")
    assert wait.merge.aux is None
    publish(wait, "r1", aux=None)
    assert wait.merge.failure
    assert "r1 is elected" in wait.merge.failure.text


# --- digests -----------------------------------------------------------------------------------------


def told(kind: str, num_pages: int = 3) -> DigestTable:
    cells = sum(len(ids) for ids in OWNED["r0"].values())
    return DigestTable(kind, np.arange(cells * num_pages, dtype=np.uint64).reshape(cells, num_pages))


def with_digests(digests: DigestTable, start_page: int = 0) -> Ready:
    return dataclasses.replace(ready(0, [1, 2, 3], OWNED["r0"], start_page=start_page), digests=digests)


@pytest.mark.parametrize("kind", ["xxh3-64", "mix64"])
def test_a_pull_has_the_digests_of_its_own_pages_and_their_kind(kind: str) -> None:
    wait = start(first_page=1)
    wait.merge.on_ready("r0", with_digests(told(kind)), wait.now)
    (pull,) = wait.take(Pull)
    order = cells_in_order(OWNED["r0"])
    rows = [order.index(cell) for cell in pull.cells]
    assert pull.digests == DigestTable(kind, told(kind).values[rows, 1:3])


@pytest.mark.parametrize("verify", [False, True])
def test_digests_of_an_unknown_kind_are_refused_with_what_is_known_and_what_to_change(verify: bool) -> None:
    """Whether or not this side asks for digests: it cannot tell whether the bytes are those that were meant."""
    wait = start(verify_digests=verify)
    empty = DigestTable("blake3-128", np.zeros((0, 0), dtype=np.uint64))
    wait.merge.on_ready("r0", with_digests(empty), wait.now)
    assert wait.take(Pull) == []
    failure = wait.merge.failure
    assert failure
    assert (failure.reason, failure.worker_id) == (FailureReason.INCOMPATIBLE, "r0")
    assert str(failure) == (
        "incompatible: incompatible peer at r0: the kind of page digests is 'blake3-128' on prefill and none but "
        "xxh3-64 and mix64 on decode; upgrade pdlink on decode, or set PDLINK_DIGEST_KIND=xxh3-64 on prefill "
        "[pulling, r0]"
    )
    assert {one.cause.text for one in wait.sent(Abort).values()} == {failure.text}


def test_digests_of_pages_that_nobody_asked_for_may_be_of_any_kind() -> None:
    wait = start()
    wait.merge.on_ready("r0", with_digests(told("blake3-128"), start_page=2), wait.now)
    assert wait.merge.failure is None
    assert wait.take(Pull) == []
