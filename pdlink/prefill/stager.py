"""Owns the staging slots that readers of one prefill rank hold, and the thread that packs into them. It decides nothing
about a request: the worker says who may read, and ends the requests of those that cannot be served.

A slot belongs to the packing thread until its piece is packed, then to the reader's ticket until the reader gives it
back, is through or gone, or has kept it for the staging timeout. Everything but the packing runs under the worker's
lock.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

from pdlink.backends.host_copy import copy
from pdlink.backends.staging import Arena
from pdlink.config import Settings
from pdlink.control.frames import Body, Credit, Staged
from pdlink.prefill.stage_job import StageJob
from pdlink.transfer.failure import Failure, FailureReason

log = logging.getLogger("pdlink.prefill")

Key: TypeAlias = tuple[str, int]
"""(transfer id, attempt)."""
REMEMBERED = 1024
"""A ticket that is this much older than the newest of its attempt is taken for a late repeat."""
JOIN_S = 5.0


@dataclass(slots=True, eq=False)
class _Ticket:
    key: Key
    number: int
    route: bytes
    job: StageJob
    asked_at: float
    slot: int | None = None
    """Taken for it; given back by whoever ends the ticket."""
    answer: Staged | None = None
    """Packed: the slot is the reader's now."""
    given_at: float = 0.0
    said_at: float = 0.0
    over: bool = False


@dataclass(slots=True)
class _Reading:
    """The tickets of one attempt: those that run, and the numbers of those that are over."""

    tickets: dict[int, _Ticket] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)
    newest: int = 0

    def is_repeat(self, number: int) -> bool:
        return number in self.over or number <= self.newest - REMEMBERED

    def end(self, number: int) -> None:
        self.tickets.pop(number, None)
        self.over.add(number)
        if len(self.over) > 2 * REMEMBERED:
            self.over = {one for one in self.over if one > self.newest - REMEMBERED}


class Stager:
    """The staging side of one prefill worker. `close` before its regions go; twice is fine.

    `send` is (route, transfer id, attempt, body); `may_read` says whether an attempt still pulls. Under the lock,
    `fail` ends the request of an attempt, and `taken_back` is told of one that had to leave slots behind.
    """

    def __init__(
        self,
        worker_id: str,
        arena: Arena,
        settings: Settings,
        lock: threading.RLock,
        clock: Callable[[], float],
        send: Callable[[bytes, str, int, Body], None],
        may_read: Callable[[Key], bool],
        fail: Callable[[Key, Failure], None],
        taken_back: Callable[[Key], None],
    ) -> None:
        self.arena = arena
        self._worker_id = worker_id
        self._settings = settings
        self._lock = lock
        self._clock = clock
        self._send = send
        self._may_read = may_read
        self._fail_request = fail
        self._taken_back = taken_back
        self._readings: dict[Key, _Reading] = {}
        self._stamps = count(secrets.randbits(62))
        self._queue: queue.SimpleQueue[_Ticket | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"pdlink-pack-{worker_id}", daemon=True)
        self._thread.start()

    # --- under the worker's lock --------------------------------------------------------------------

    def num_tickets(self, key: Key) -> int:
        """Pieces of an attempt that are asked for, or packed and not given back."""
        reading = self._readings.get(key)
        return len(reading.tickets) if reading else 0

    def knows(self, key: Key, number: int) -> bool:
        """Whether this ticket has been asked for before; one that is packed is answered again."""
        reading = self._readings.get(key)
        ticket = reading.tickets.get(number) if reading else None
        if ticket and ticket.answer:
            self._say(ticket, ticket.answer)
        return ticket is not None or (reading is not None and reading.is_repeat(number))

    def stage(self, key: Key, number: int, route: bytes, job: StageJob) -> None:
        """Pack a new ticket's piece as soon as there is a slot. `key` is of an attempt that may read."""
        if self._closed:
            return
        reading = self._readings.setdefault(key, _Reading())
        ticket = reading.tickets[number] = _Ticket(key, number, route, job, self._clock())
        reading.newest = max(reading.newest, number)
        self._queue.put(ticket)

    def credit(self, key: Key, body: Credit) -> None:
        """Take slots back that their reader has read. Others, and other stamps, are left alone."""
        reading = self._readings.get(key)
        back = set(zip(body.slots, body.stamps, strict=False))
        for ticket in list(reading.tickets.values()) if reading and back else ():
            if ticket.answer and (ticket.answer.slot, ticket.answer.stamp) in back:
                self._end(ticket)

    def look(self, key: Key) -> None:
        """Let go of an attempt that reads no more."""
        reading = self._readings.get(key)
        if reading is None or self._may_read(key):
            return
        del self._readings[key]
        held = [ticket for ticket in reading.tickets.values() if ticket.answer]
        for ticket in list(reading.tickets.values()):
            self._end(ticket)
        if held:
            self._taken_back(key)

    def sweep(self) -> None:
        """Let go of attempts that are over, remind readers of slots that they hold, and end those that keep them."""
        now = self._clock()
        for key in list(self._readings):
            self.look(key)
        for ticket in list(self._held()):
            if ticket.answer is None or ticket.over:
                continue
            if now - ticket.given_at > self._settings.staging_timeout_s:
                text = (
                    f"a reader has kept staging slot {ticket.answer.slot} for {now - ticket.given_at:.1f} s "
                    "(PDLINK_STAGING_TIMEOUT_S)"
                )
                self._fail_request(ticket.key, Failure(FailureReason.TIMEOUT, text, self._worker_id, "staging"))
                self.look(ticket.key)
            elif now - ticket.said_at > self._settings.resend_interval_s:
                # Its answer or its credit may be lost: the reader answers what it has no use for with a credit.
                self._say(ticket, ticket.answer)

    def _held(self) -> Iterable[_Ticket]:
        return (ticket for reading in self._readings.values() for ticket in reading.tickets.values())

    def _end(self, ticket: _Ticket) -> None:
        """The ticket is over. A slot that is being packed into comes back from the packing thread."""
        ticket.over = True
        reading = self._readings.get(ticket.key)
        if reading:
            reading.end(ticket.number)
        if ticket.answer:
            self._give(ticket)

    def _give(self, ticket: _Ticket) -> None:
        slot, ticket.slot = ticket.slot, None
        if slot is not None:
            self.arena.slots.give(slot)

    def _say(self, ticket: _Ticket, body: Body) -> None:
        ticket.said_at = self._clock()
        self._send(ticket.route, *ticket.key, body)

    # --- the packing thread -------------------------------------------------------------------------

    def close(self) -> None:
        """End the thread and take every slot back. Not under the worker's lock, which the thread may need."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for ticket in list(self._held()):
                self._end(ticket)
            self._readings.clear()
        self._queue.put(None)
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            log.error("packing for %s does not end", self._worker_id)

    def _run(self) -> None:
        while (ticket := self._queue.get()) is not None:
            try:
                self._serve(ticket)
            except Exception as error:  # a bug of ours ends this ticket, not the thread
                log.exception("packing for %s failed", self._worker_id)
                self._fail(ticket, Failure(FailureReason.INTERNAL, f"{type(error).__name__}: {error}"))

    def _serve(self, ticket: _Ticket) -> None:
        waited = self._settings.staging_timeout_s
        ticket.slot = self.arena.slots.take(
            ticket.asked_at + waited - self._clock(), lambda: self._closed or ticket.over
        )
        if ticket.slot is None:
            text = f"none of the {self.arena.slots.num_slots} staging slots came free within {waited:g} s"
            fix = "raise PDLINK_STAGING_SLOTS on prefill, or PDLINK_STAGING_TIMEOUT_S on both"
            self._fail(ticket, Failure(FailureReason.TIMEOUT, text, self._worker_id, "staging", fix))
            return
        address = self.arena.area.address(ticket.slot)
        packed = copy(ticket.job.copies(address), lambda: ticket.over)
        with self._lock:
            if ticket.over or not packed:
                self._give(ticket)
            elif not ticket.job.is_current:
                self._fail(ticket, _changed(self._worker_id, ticket.job))
            else:
                self._grant(ticket)

    def _grant(self, ticket: _Ticket) -> None:
        assert ticket.slot is not None
        job, slot = ticket.job, ticket.slot
        offset = slot * self.arena.area.slot_bytes
        ticket.answer = Staged(ticket.number, slot, offset, job.nbytes, next(self._stamps), job.generation)
        ticket.given_at = self._clock()
        self._say(ticket, ticket.answer)

    def _fail(self, ticket: _Ticket, cause: Failure) -> None:
        with self._lock:
            self._give(ticket)
            if not ticket.over:
                ticket.answer = None
                self._end(ticket)
                self._fail_request(ticket.key, cause)
                self.look(ticket.key)


def _changed(worker_id: str, job: StageJob) -> Failure:
    text = f"pages of publication {job.publication.sequence} were taken back while they were packed"
    return Failure(FailureReason.GENERATION, text, worker_id, "staging")
