"""Owns the translation of pdlink's transfer states into sglang's `KVPoll`. It keeps no state."""

from __future__ import annotations

from collections.abc import Mapping

from sglang.srt.disaggregation.base.conn import KVPoll

from pdlink.transfer.states import ReceiverState, SenderState

_RECEIVER: Mapping[ReceiverState, int] = {
    ReceiverState.RESOLVING: KVPoll.WaitingForInput,
    ReceiverState.SUBSCRIBED: KVPoll.WaitingForInput,
    ReceiverState.PULLING: KVPoll.Transferring,
    ReceiverState.CONFIRMING: KVPoll.Transferring,
    # The pages are not sglang's yet: something may still land in them.
    ReceiverState.DRAINING: KVPoll.Transferring,
    ReceiverState.DONE: KVPoll.Success,
    ReceiverState.FAILED: KVPoll.Failed,
    ReceiverState.ABORTED: KVPoll.Failed,
}


def receiver_poll(state: ReceiverState) -> int:
    """What sglang's decode scheduler is told of a receive in `state`."""
    return _RECEIVER[state]


def sender_poll(state: SenderState, *, is_wanted: bool, has_sent: bool) -> int:
    """What sglang's prefill scheduler is told of a request in `state`.

    `is_wanted`: every reader has subscribed. `has_sent`: the scheduler has called `send`; before that it takes no more
    than `WaitingForInput`, and success must not come before the pages are free to be reused.
    """
    if state is SenderState.RELEASED:
        return KVPoll.Success
    if state.is_final:
        return KVPoll.Failed
    if has_sent:
        return KVPoll.Transferring
    return KVPoll.WaitingForInput if is_wanted else KVPoll.Bootstrapping
