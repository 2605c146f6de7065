"""Owns one pull by the staged way, piece by piece: own slot, then the owner's, one large range, the pages out of it.

It runs on the thread of the owner's puller. While one piece is on the wire or unpacked, the owner packs the next one.
Slots are taken in one order, own ones first, and a pull that holds a slot never waits for another own one, so that no
two requests can wait for each other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from pdlink.backends.base import PullHandle
from pdlink.backends.host_copy import copy
from pdlink.backends.staging import Arena
from pdlink.config import Settings
from pdlink.control.frames import Body, Credit, Stage, Staged
from pdlink.decode.actions import Pull
from pdlink.decode.stage_inbox import StageInbox
from pdlink.layout.staging import StagingArea
from pdlink.transfer.descriptors import PullBatch
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.packing import PageTable, Piece, cut, one_range, unpack

DEPTH = 2
"""Slots that one pull holds at most, on either side."""
PIECES = 4
"""Into about so many pieces a pull is cut, so that packing, wire and unpacking overlap."""
LEAST_PIECE_BYTES = 1 << 20
LOOK_S = 0.02
ANSWER_SLACK_S = 1.0
"""The owner's own deadline comes first: it can say what it waited for."""

Outcome: TypeAlias = Failure | None


class Wire(Protocol):
    """The puller's backend, for batches of this pull."""

    def start(self, batch: PullBatch) -> PullHandle: ...

    def finish(self, handle: PullHandle) -> Outcome:
        """Wait for the end of a pull; it is quiet then, also when this raises."""

    def drop(self, handle: PullHandle) -> None:
        """Make a pull quiet without waiting for its bytes."""


@dataclass(frozen=True, slots=True)
class StagingLink:
    """What staged pulls from one owner need: both areas, and where its answers come in."""

    arena: Arena
    source: StagingArea
    inbox: StageInbox
    settings: Settings

    @property
    def slot_bytes(self) -> int:
        """What a piece may have: it must fit a slot on both sides."""
        return min(self.arena.area.slot_bytes, self.source.slot_bytes)

    def pieces(self, pull: Pull) -> list[Piece]:
        """The cut of a pull. Raises `PlanError` where a page does not fit a slot."""
        (move,) = pull.batch.moves
        aim = max(LEAST_PIECE_BYTES, -(-move.nbytes // PIECES))
        largest = int(move.layers.page_bytes.max())
        page_bytes = move.layers.page_bytes[pull.packing_order]
        return cut(page_bytes, len(pull.pages), min(max(aim, largest), self.slot_bytes))


@dataclass(slots=True, eq=False)
class _Asked:
    """A piece that the owner was asked for, and the own slot that it will come to."""

    piece: Piece
    slot: int
    ticket: int
    since: float
    said: float
    body: Stage
    answer: Staged | None = None
    handle: PullHandle | None = None


class StagedPull:
    """One pull. `run` once; every slot is given back when it returns or raises."""

    def __init__(
        self,
        link: StagingLink,
        pull: Pull,
        key: tuple[str, int],
        tickets: Iterator[int],
        send: Callable[[Body], None],
        stop: Callable[[], bool],
        wire: Wire,
    ) -> None:
        self._link = link
        self._pull = pull
        self._key = key
        self._tickets = tickets
        self._send = send
        self._stop = stop
        self._wire = wire
        (move,) = pull.batch.moves
        order = pull.packing_order
        self._cells = [pull.cells[row] for row in order.tolist()]
        layers = move.layers.take(order)
        self._target = PageTable(layers.destination_base, layers.destination_stride, layers.page_bytes)
        self._todo = deque(link.pieces(pull))
        self._asked: deque[_Asked] = deque()

    def run(self) -> Outcome:
        """Move every piece. Returns what went wrong, once nothing of it can land any more."""
        try:
            while self._todo or self._asked:
                failure = self._ask_ahead() or self._move_first()
                if failure:
                    return failure
            return None
        finally:
            self._let_go()

    # --- asking -------------------------------------------------------------------------------------

    def _ask_ahead(self) -> Outcome:
        slots = self._link.arena.slots
        while self._todo and len(self._asked) < DEPTH:
            waited = self._link.settings.staging_timeout_s
            slot = slots.try_take() if self._asked else slots.take(waited, self._stop)
            if slot is None and self._asked:
                return None
            if slot is None:
                return self._stopped() or self._no_slot(waited)
            self._ask(self._todo.popleft(), slot)
        return None

    def _ask(self, piece: Piece, slot: int) -> None:
        ticket, now = next(self._tickets), time.monotonic()
        layers: dict[str, tuple[int, ...]] = {}
        for component, layer in self._cells[piece.rows]:
            layers[component] = (*layers.get(component, ()), layer)
        body = Stage(ticket, self._pull.sequence, self._pull.first_page + piece.first_page, piece.num_pages, layers)
        self._asked.append(_Asked(piece, slot, ticket, now, now, body))
        self._link.inbox.expect(self._key, ticket)
        self._send(body)

    # --- moving -------------------------------------------------------------------------------------

    def _move_first(self) -> Outcome:
        """Bring the piece that was asked for first to its pages."""
        first = self._asked[0]
        failure = self._await(first) or self._start(first)
        if failure:
            return failure
        assert first.handle is not None
        handle, first.handle = first.handle, None
        failure = self._wire.finish(handle)
        if failure:
            return failure
        self._give_back(first)
        # What is on its way to the next slot needs nobody here while this one is unpacked.
        if len(self._asked) > 1 and (failure := self._start_if_answered(self._asked[1])):
            return failure
        address = self._link.arena.area.address(first.slot)
        pages = self._pull.pages[first.piece.pages]
        if not copy(unpack(pages, self._target.take(first.piece.rows), address), self._stop):
            return self._stopped()
        self._asked.popleft()
        self._link.arena.slots.give(first.slot)
        return None

    def _await(self, asked: _Asked) -> Outcome:
        """Wait until the owner has packed a piece, asking again where an answer may be lost."""
        settings = self._link.settings
        limit = asked.since + settings.staging_timeout_s + ANSWER_SLACK_S
        while asked.answer is None:
            if failure := self._stopped():
                return failure
            now = time.monotonic()
            if now >= limit:
                return self._no_answer(now - asked.since)
            if now - asked.said >= settings.resend_interval_s:
                asked.said = now
                self._send(asked.body)
            asked.answer = self._link.inbox.take(self._key, asked.ticket, LOOK_S)
        return None

    def _start_if_answered(self, asked: _Asked) -> Outcome:
        asked.answer = asked.answer or self._link.inbox.take(self._key, asked.ticket, 0)
        return self._start(asked) if asked.answer else None

    def _start(self, asked: _Asked) -> Outcome:
        if asked.handle:
            return None
        answer = asked.answer
        assert answer is not None
        failure = self._unusable(answer, asked.piece)
        if failure:
            return failure
        link = self._link
        batch = one_range(
            self._pull.worker_id, link.source, answer.slot, link.arena.area, asked.slot, asked.piece.nbytes
        )
        asked.handle = self._wire.start(batch)
        return None

    def _unusable(self, answer: Staged, piece: Piece) -> Outcome:
        source = self._link.source
        right = answer.slot < source.num_slots and answer.offset == answer.slot * source.slot_bytes
        if not right or answer.nbytes != piece.nbytes:
            text = (
                f"staged {answer.nbytes} bytes in slot {answer.slot} at {answer.offset}; asked were {piece.nbytes} "
                f"bytes in one of {source.num_slots} slots of {source.slot_bytes}"
            )
            return Failure(FailureReason.PROTOCOL, text, self._pull.worker_id, "staging")
        if answer.generation != self._pull.generation:
            text = f"publication {self._pull.sequence} was taken back before its pages were packed"
            return Failure(FailureReason.GENERATION, text, self._pull.worker_id, "staging")
        return None

    # --- letting go ---------------------------------------------------------------------------------

    def _give_back(self, asked: _Asked) -> None:
        """Nothing reads the owner's slot any more."""
        self._link.inbox.forget(self._key, asked.ticket)
        if asked.answer:
            self._send(Credit((asked.answer.slot,), (asked.answer.stamp,)))

    def _let_go(self) -> None:
        """Make what is on its way quiet, then give both sides' slots back."""
        while self._asked:
            asked = self._asked.popleft()
            if asked.handle:
                self._wire.drop(asked.handle)
            asked.answer = asked.answer or self._link.inbox.take(self._key, asked.ticket, 0)
            self._give_back(asked)
            self._link.arena.slots.give(asked.slot)

    # --- what goes wrong ----------------------------------------------------------------------------

    def _stopped(self) -> Outcome:
        if not self._stop():
            return None
        return Failure(FailureReason.ABORTED, "stopped by the request", self._pull.worker_id)

    def _no_slot(self, waited_s: float) -> Failure:
        text = f"none of the {self._link.arena.slots.num_slots} own staging slots came free within {waited_s:g} s"
        fix = "raise PDLINK_STAGING_SLOTS or PDLINK_STAGING_TIMEOUT_S on decode"
        return Failure(FailureReason.TIMEOUT, text, self._pull.worker_id, "staging", fix)

    def _no_answer(self, waited_s: float) -> Failure:
        text = f"{self._pull.worker_id} has staged nothing for {waited_s:.1f} s"
        fix = "see that rank's log, or raise PDLINK_STAGING_TIMEOUT_S"
        return Failure(FailureReason.TIMEOUT, text, self._pull.worker_id, "staging", fix)
