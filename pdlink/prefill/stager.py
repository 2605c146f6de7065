"""Owns the tickets of one prefill rank's readers, and the staging slots that these hold. It packs nothing itself (see
`packer`) and decides nothing about a request: the worker says who may read, and ends requests that cannot be served.

A slot belongs to the packing thread until its piece is packed, then to the reader's ticket until the reader gives it
back, is through or gone, or has kept it for the staging timeout. Everything but the packing runs under the worker's
lock.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from pdlink.backends.staging import Arena
from pdlink.config import Settings
from pdlink.control.frames import Body, Credit, Staged
from pdlink.events import Events
from pdlink.prefill.packer import Key, Packer, Ticket
from pdlink.prefill.stage_job import StageJob
from pdlink.transfer.ahead import is_ahead
from pdlink.transfer.failure import Failure, FailureReason

REMEMBERED = 1024
"""A ticket that is this much older than the newest of its attempt is taken for a late repeat."""


@dataclass(slots=True)
class _Reading:
    """The tickets of one attempt: those that run, and the numbers of those that are over."""

    tickets: dict[int, Ticket] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)
    newest: int = 0

    def is_repeat(self, number: int) -> bool:
        return number in self.over or number <= self.newest - REMEMBERED

    def end(self, number: int) -> None:
        self.tickets.pop(number, None)
        if is_ahead(number):
            return  # which no reader asks for, so that it cannot come again
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
        events: Events | None = None,
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
        self._closed = False
        self._packer = Packer(worker_id, arena, settings.staging_timeout_s, clock, self._packed, events)

    # --- under the worker's lock --------------------------------------------------------------------

    def num_tickets(self, key: Key) -> int:
        """Pieces of an attempt that are asked for, or packed and not given back."""
        reading = self._readings.get(key)
        return len(reading.tickets) if reading else 0

    def knows(self, key: Key, number: int, route: bytes) -> bool:
        """Whether this ticket has been asked for before; one that is packed is answered again, along `route`."""
        reading = self._readings.get(key)
        ticket = reading.tickets.get(number) if reading else None
        if ticket:
            ticket.route = route
            if ticket.answer:
                self._say(ticket, ticket.answer)
        return ticket is not None or (reading is not None and reading.is_repeat(number))

    def stage(self, key: Key, number: int, route: bytes, job: StageJob) -> None:
        """Pack a new ticket's piece as soon as there is a slot. `key` is of an attempt that may read."""
        if self._closed:
            return
        reading = self._readings.setdefault(key, _Reading())
        ticket = reading.tickets[number] = Ticket(key, number, route, job, self._clock())
        reading.newest = max(reading.newest, number)
        self._packer.put(ticket)

    def reroute(self, key: Key, route: bytes) -> None:
        """Answer an attempt along `route` from now on."""
        reading = self._readings.get(key)
        for ticket in reading.tickets.values() if reading else ():
            ticket.route = route

    @property
    def is_free(self) -> bool:
        """Whether slots may be given away unasked: nobody who asked waits for one. What is packed unasked then comes
        before whatever is asked for later, so that it never holds a slot behind somebody who waits for that."""
        return not (self._closed or self._packer.death) and not any(ticket.slot is None for ticket in self._held())

    def reserve(self, key: Key, route: bytes, numbered: Iterable[tuple[int, StageJob]]) -> list[Ticket]:
        """Tickets for pieces that nobody has asked for yet, as many as there are free slots. `begin` must follow."""
        tickets: list[Ticket] = []
        for number, job in numbered:
            slot = self.arena.slots.try_take() if job.nbytes <= self.arena.area.slot_bytes else None
            if slot is None:
                break
            tickets.append(Ticket(key, number, route, job, self._clock(), slot))
        return tickets

    def begin(self, tickets: Iterable[Ticket]) -> None:
        """Pack into slots that were reserved."""
        for ticket in tickets:
            self._readings.setdefault(ticket.key, _Reading()).tickets[ticket.number] = ticket
            self._packer.put(ticket)

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

    def _held(self) -> Iterable[Ticket]:
        return (ticket for reading in self._readings.values() for ticket in reading.tickets.values())

    def _end(self, ticket: Ticket) -> None:
        """The ticket is over. A slot that is being packed into comes back from the packing thread."""
        ticket.over = True
        reading = self._readings.get(ticket.key)
        if reading:
            reading.end(ticket.number)
        if ticket.answer:
            self._give(ticket)

    def _give(self, ticket: Ticket) -> None:
        slot, ticket.slot = ticket.slot, None
        if slot is not None:
            self.arena.slots.give(slot)

    def _say(self, ticket: Ticket, body: Body) -> None:
        ticket.said_at = self._clock()
        self._send(ticket.route, *ticket.key, body)

    # --- not under the worker's lock ----------------------------------------------------------------

    def close(self) -> None:
        """End the thread and take every slot back. Not under the worker's lock, which the thread may need."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for ticket in list(self._held()):
                self._end(ticket)
            self._readings.clear()
        self._packer.close()

    def _packed(self, ticket: Ticket, failure: Failure | None) -> None:
        """The packing thread is through with a ticket."""
        with self._lock:
            if ticket.over:
                self._give(ticket)
            elif failure is None and not ticket.job.is_current:
                self._fail(ticket, _changed(self._worker_id, ticket.job))
            elif failure:
                self._fail(ticket, failure)
            else:
                self._grant(ticket)

    def _grant(self, ticket: Ticket) -> None:
        assert ticket.slot is not None
        job, slot = ticket.job, ticket.slot
        offset = slot * self.arena.area.slot_bytes
        ticket.answer = Staged(ticket.number, slot, offset, job.nbytes, next(self._stamps), job.generation)
        ticket.given_at = self._clock()
        self._say(ticket, ticket.answer)

    def _fail(self, ticket: Ticket, cause: Failure) -> None:
        self._give(ticket)
        self._end(ticket)
        self._fail_request(ticket.key, cause)
        self.look(ticket.key)


def _changed(worker_id: str, job: StageJob) -> Failure:
    text = f"pages of publication {job.publication.sequence} were taken back while they were packed"
    return Failure(FailureReason.GENERATION, text, worker_id, "staging")
