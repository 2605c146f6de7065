"""Owns one receive while it runs: its decisions, handle and link, and the frames between them. It keeps no time.

Not thread-safe: the decode worker calls it under its lock.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from pdlink.control.frames import AbortAck, Body, Credit, Failed, Frame, Ready, Refused, Staged, Subscribed, Verdict
from pdlink.decode.actions import Pull
from pdlink.decode.links import Link, PrefillInstance
from pdlink.decode.merge import Merge
from pdlink.decode.receiver import Receiver, ReceiveResult
from pdlink.transfer.ahead import Ahead, ahead_ticket, is_ahead
from pdlink.transfer.failure import Failure
from pdlink.transfer.states import ReceiverState

MAX_RETURNED = 1024
"""Of one request. Past it nothing that is staged unasked is taken any more, so that no owner can make the set grow."""


@dataclass(slots=True, eq=False)
class Live:
    """One receive. `link` is the one that it was planned with; `stop` is set once nothing more may be posted."""

    merge: Merge
    receiver: Receiver
    instance: PrefillInstance
    link: Link | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    shown: ReceiverState | None = None
    backends: dict[str, str] = field(default_factory=dict)
    """Which backend served each owner."""
    ways: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By which ways its pulls moved, in the order in which they were first used."""
    trace_parent: str = ""
    """The engine's trace context, where it gave one."""
    plan_s: float = 0.0
    """What making the plan took, or finding a kept one."""
    ahead: dict[str, Ahead | None] = field(default_factory=dict)
    """What each owner may stage unasked: said with the first subscribe, and the same from then on."""
    returned: set[tuple[str, int]] = field(default_factory=set)
    """(worker id, ticket) of what was staged unasked and came before the Ready that tells of it: it went back."""

    @property
    def key(self) -> tuple[str, int]:
        return self.receiver.transfer_id, self.receiver.attempt

    def frame(self, body: Body) -> Frame:
        return Frame(*self.key, body)

    def send(self, worker_id: str, *bodies: Body) -> None:
        assert self.link is not None
        self.link.ranks[worker_id].channel.send(*map(self.frame, bodies))

    def on_pulled(self, worker_id: str, ticket: int, failure: Failure | None, now: float) -> None:
        assert self.link is not None
        puller = self.link.ranks[worker_id].puller
        if name := puller.stats.backend:
            self.backends[worker_id] = name
        if puller.ways.last:
            self.ways[worker_id] = tuple(dict.fromkeys((*self.ways.get(worker_id, ()), puller.ways.last.way.value)))
        self.merge.on_pulled(worker_id, ticket, failure, now)

    def dispatch(self, worker_id: str, body: Body, now: float) -> bool:
        """Hand a frame's body to the merge; False for a kind that a prefill rank has no business to send."""
        merge = self.merge
        if isinstance(body, Ready):
            merge.on_ready(worker_id, body, now)
        elif isinstance(body, Subscribed):
            merge.on_subscribed(worker_id, body, now)
        elif isinstance(body, Verdict):
            merge.on_verdict(worker_id, body.unchanged, body.cause, now)
        elif isinstance(body, Refused | Failed):
            merge.on_refused(worker_id, body.cause, now)
        elif isinstance(body, AbortAck):
            merge.on_abort_ack(worker_id, now)
        elif isinstance(body, Staged):
            self._on_staged(worker_id, body)
        else:
            return False
        return True

    def _on_staged(self, worker_id: str, body: Staged) -> None:
        """For the puller; a slot that it does not read (any more) goes back, as its credit may have been lost."""
        rank = self.link.ranks.get(worker_id) if self.link else None
        if rank and not rank.puller.ways.inbox.put(self.key, body):
            if is_ahead(body.ticket) and len(self.returned) < MAX_RETURNED:
                self.returned.add((worker_id, body.ticket))
            self.send(worker_id, Credit((body.slot,), (body.stamp,)))

    def ahead_of(self, pull: Pull) -> Ahead | None:
        """What of a pull is staged unasked: no more than was asked for, whatever its owner says.

        Nothing where a part of it came too early and went back. A repeat of such an answer must never be taken: the
        owner may have packed something else into that slot since.
        """
        asked = self.ahead.get(pull.worker_id) if len(self.returned) < MAX_RETURNED else None
        num_pieces = min(pull.staged_pieces, asked.num_pieces) if asked else 0
        tickets = {(pull.worker_id, ahead_ticket(pull.sequence, index)) for index in range(num_pieces)}
        if not (asked and tickets) or tickets & self.returned:
            return None
        return Ahead(asked.piece_bytes, num_pieces)

    def show(self) -> bool:
        """Make the merge's state visible to the engine; whether it has changed."""
        merge, state = self.merge, self.merge.state
        if state is self.shown:
            return False
        self.shown = state
        result = None
        if state is ReceiverState.DONE:
            result = ReceiveResult(
                merge.aux, dict(merge.num_bytes), self.backends, merge.num_descriptors, merge.elapsed_s, self.ways
            )
        self.receiver.update(state, merge.failure, result)
        return True
