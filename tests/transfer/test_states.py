import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.errors import Mismatch
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.states import RECEIVER_MOVES, SENDER_MOVES, ReceiverState, SenderState, StateCell

TABLES = pytest.mark.parametrize(("states", "moves"), [(ReceiverState, RECEIVER_MOVES), (SenderState, SENDER_MOVES)])


def reachable(moves, start):
    seen, todo = set(), [start]
    while todo:
        state = todo.pop()
        if state not in seen:
            seen.add(state)
            todo += moves[state]
    return seen


@TABLES
def test_every_state_has_a_row(states, moves):
    assert set(moves) == set(states)
    assert set().union(*moves.values()) <= set(states)


@TABLES
def test_final_states_have_no_exit_and_all_others_have(states, moves):
    assert {state for state in states if not moves[state]} == {state for state in states if state.is_final}


@TABLES
def test_a_final_state_can_be_reached_from_every_other(states, moves):
    for state in states:
        assert any(one.is_final for one in reachable(moves, state))


@TABLES
def test_every_state_can_be_reached_from_the_first(states, moves):
    assert reachable(moves, next(iter(states))) == set(states)


@TABLES
def test_no_state_can_be_entered_twice(states, moves):
    for state in states:
        assert all(state not in reachable(moves, after) for after in moves[state])


def test_a_receiver_fails_only_by_draining_and_can_drain_until_its_end():
    for state in ReceiverState:
        assert not moves_to_failure(state) or state is ReceiverState.DRAINING
        assert state.is_final or state is ReceiverState.DRAINING or ReceiverState.DRAINING in RECEIVER_MOVES[state]
    assert ReceiverState.DONE not in RECEIVER_MOVES[ReceiverState.DRAINING]


def moves_to_failure(state):
    return RECEIVER_MOVES[state] & {ReceiverState.FAILED, ReceiverState.ABORTED}


def test_a_receiver_is_done_only_after_confirmation_or_with_nothing_to_move():
    before = {state for state in ReceiverState if ReceiverState.DONE in RECEIVER_MOVES[state]}
    assert before == {ReceiverState.CONFIRMING, ReceiverState.RESOLVING}


def test_a_sender_is_released_only_after_its_last_publish_and_can_end_badly_before():
    assert {one for one in SenderState if SenderState.RELEASED in SENDER_MOVES[one]} == {SenderState.PUBLISHED}
    for state in SenderState:
        assert state.is_final or {SenderState.ABORTED, SenderState.EXPIRED} <= SENDER_MOVES[state]


@TABLES
@given(st.data())
def test_a_cell_moves_along_its_table_and_asserts_on_any_other_move(states, moves, data):
    cell = StateCell(next(iter(states)), moves)
    for to in data.draw(st.lists(st.sampled_from(list(states)), max_size=8)):
        before = cell.now
        if to in moves[before]:
            cell.advance(to)
            assert cell.now is to
        else:
            with pytest.raises(AssertionError, match=f"no move from {before} to {to}"):
                cell.advance(to)
            assert cell.now is before


def test_a_failure_reads_as_reason_text_fix_and_place():
    failure = Failure(FailureReason.TIMEOUT, "no page came for 5 s", fix="raise PDLINK_PROGRESS_TIMEOUT_S")
    assert str(failure) == "timeout: no page came for 5 s; raise PDLINK_PROGRESS_TIMEOUT_S"
    placed = failure.at("pulling", "p/cp2")
    assert str(placed).endswith(" [pulling, p/cp2]")
    assert placed.at("draining", "p/cp3") == placed
    assert str(failure.at("", "p/cp2")).endswith(" [p/cp2]")


def test_a_fix_that_the_text_says_already_is_not_repeated():
    failure = Failure.incompatible((Mismatch("page_size", "64", "32", "use one"),), "p/cp0", "subscribe")
    assert str(failure).count("use one") == 1
    assert failure.reason is FailureReason.INCOMPATIBLE
    assert "64 on prefill and 32 on decode" in str(failure)
