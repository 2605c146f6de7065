"""Owns the two state tables of a transfer, the receiver's and the sender's. It acts on nothing."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar


class ReceiverState(StrEnum):
    RESOLVING = "resolving"
    SUBSCRIBED = "subscribed"
    PULLING = "pulling"
    CONFIRMING = "confirming"
    DONE = "done"
    DRAINING = "draining"
    FAILED = "failed"
    ABORTED = "aborted"

    @property
    def is_final(self) -> bool:
        return self in (ReceiverState.DONE, ReceiverState.FAILED, ReceiverState.ABORTED)


class SenderState(StrEnum):
    OPEN = "open"
    PUBLISHING = "publishing"
    PUBLISHED = "published"
    RELEASED = "released"
    ABORTED = "aborted"
    EXPIRED = "expired"

    @property
    def is_final(self) -> bool:
        return self in (SenderState.RELEASED, SenderState.ABORTED, SenderState.EXPIRED)


_R, _S = ReceiverState, SenderState

RECEIVER_MOVES: Mapping[ReceiverState, frozenset[ReceiverState]] = {
    # RESOLVING -> DONE: nothing to move, nothing to wait for; the owners are released in passing.
    _R.RESOLVING: frozenset({_R.SUBSCRIBED, _R.DONE, _R.DRAINING}),
    _R.SUBSCRIBED: frozenset({_R.PULLING, _R.CONFIRMING, _R.DRAINING}),
    _R.PULLING: frozenset({_R.CONFIRMING, _R.DRAINING}),
    _R.CONFIRMING: frozenset({_R.DONE, _R.DRAINING}),
    _R.DRAINING: frozenset({_R.FAILED, _R.ABORTED}),
    _R.DONE: frozenset(),
    _R.FAILED: frozenset(),
    _R.ABORTED: frozenset(),
}

SENDER_MOVES: Mapping[SenderState, frozenset[SenderState]] = {
    _S.OPEN: frozenset({_S.PUBLISHING, _S.PUBLISHED, _S.ABORTED, _S.EXPIRED}),
    _S.PUBLISHING: frozenset({_S.PUBLISHED, _S.ABORTED, _S.EXPIRED}),
    _S.PUBLISHED: frozenset({_S.RELEASED, _S.ABORTED, _S.EXPIRED}),
    _S.RELEASED: frozenset(),
    _S.ABORTED: frozenset(),
    _S.EXPIRED: frozenset(),
}

StateT = TypeVar("StateT", bound=StrEnum)


class StateCell(Generic[StateT]):
    """One object's state; it moves only along its table, and never out of a final state."""

    def __init__(self, start: StateT, moves: Mapping[StateT, frozenset[StateT]]) -> None:
        self._state = start
        self._moves = moves

    @property
    def now(self) -> StateT:
        return self._state

    def advance(self, to: StateT) -> None:
        """Move to `to`. A move that the table lacks is a bug of ours, hence an assertion."""
        assert to in self._moves[self._state], f"no move from {self._state} to {to}"
        self._state = to
