"""Owns the thread that packs pieces into staging slots, and the order in which it takes slots and launches copies.

It knows no reader: who asked, and what becomes of a slot that is packed, is the stager's.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from pdlink.backends.copiers import Copier, Copying, Prepared, open_copier
from pdlink.backends.staging import Arena
from pdlink.control.frames import Staged
from pdlink.errors import BackendError
from pdlink.events import Events
from pdlink.layout.regions import MemoryKind
from pdlink.prefill.stage_job import StageJob
from pdlink.threads import Death, SupervisedThread
from pdlink.transfer.descriptors import PullBatch
from pdlink.transfer.failure import Failure, FailureReason

log = logging.getLogger("pdlink.prefill")

Key: TypeAlias = tuple[str, int]
"""(transfer id, attempt)."""
MAX_UNDER_WAY = 2
"""Copies on a device at once: the next one is launched before the end of the present one is waited for."""
YIELD_S = 50e-6
"""A real pause after the first piece of several is reported. The I/O thread, which tells its reader, gets the
interpreter only while this one sleeps, and its reader has nothing to pull before."""
JOIN_S = 5.0


@dataclass(slots=True, eq=False)
class Ticket:
    """A piece that a reader wants packed. Whoever made it may set `over` at any time: then nobody wants it any more."""

    key: Key
    number: int
    route: bytes
    job: StageJob
    asked_at: float
    slot: int | None = None
    """Taken for it. The packing thread's until it has reported the ticket; then its reader's, or given back."""
    answer: Staged | None = None
    """Packed: the slot is the reader's now."""
    given_at: float = 0.0
    said_at: float = 0.0
    over: bool = False


class Packer:
    """One thread. What `put` takes is reported to `done` once, on that thread, in its order: packed into its slot, or
    with what went wrong, or neither where it was `over`. `close` twice is fine.

    Copies on a device overlap, but for the first of several: its reader has nothing to pull before it hears of it, so
    that its end comes before the launch of the next, which is made ready meanwhile.

    When the thread dies, what it has and what comes later is reported with that, the latter by whoever puts it.

    A ticket may wait `timeout_s` for a slot, from `asked_at` on.
    """

    def __init__(
        self,
        worker_id: str,
        arena: Arena,
        timeout_s: float,
        clock: Callable[[], float],
        done: Callable[[Ticket, Failure | None], None],
        events: Events | None = None,
    ) -> None:
        self._worker_id = worker_id
        self._arena = arena
        self._timeout_s = timeout_s
        self._clock = clock
        self._done = done
        self._queue: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._next: Ticket | None = None
        """The first that is not begun, where it has to wait for a slot, or for the first of several."""
        self._prepared: Prepared | None = None
        """The copy of `_next`, where it has its slot."""
        self._first: Ticket | None = None
        """The one that came when there was nothing else to do, until it is reported."""
        self._under_way: deque[tuple[Ticket, Copying | None]] = deque()
        self._copier: Copier | None = None
        self._ended = False
        self._current: Ticket | None = None
        """Taken from the queue, and neither under way nor reported."""
        self._thread = SupervisedThread(
            self._run,
            f"pdlink-pack-{worker_id}",
            f"prefill {worker_id}",
            events=events,
            on_death=self._die,
            at_end=self._let_go,
            was_asked=lambda: self._ended,
        )
        self._thread.start()

    @property
    def death(self) -> Death | None:
        """How the thread ended, where nobody asked it to."""
        return self._thread.death

    def put(self, ticket: Ticket) -> None:
        """Pack this one after those before it. Not after `close`."""
        self._queue.put(ticket)
        if self.death:
            self._fail_queued(self.death)

    def close(self) -> None:
        """End after what was put, which must be `over`: nothing reads its pages when this returns."""
        self._queue.put(None)
        if not self._thread.join(JOIN_S):
            log.error("packing for %s does not end", self._worker_id)

    def _run(self) -> None:
        while not self._ended or self._under_way or self._next:
            if not self._begin_next() and self._under_way:
                self._finish()
            while self._under_way and self._is_over():
                self._finish()

    def _let_go(self) -> None:
        if self.death:  # what came while the dead one's tickets were reported
            self._fail_queued(self.death)
        if self._copier:
            self._copier.close()

    def _die(self, death: Death) -> None:
        """Report what the thread had. A slot that a device may still copy into is given to nobody any more."""
        tickets = [self._current, self._next] if self._current is not self._next else [self._current]
        for ticket, copying in self._under_way:
            try:
                if copying:
                    copying.wait()
            except BaseException:
                log.exception("slot %s of %s is lost: it may still be copied into", ticket.slot, self._worker_id)
                ticket.slot = None
            tickets.append(ticket)
        self._under_way.clear()
        for one in tickets:
            if one:
                self._report(one, self._dead(death))
        self._fail_queued(death)

    def _fail_queued(self, death: Death) -> None:
        with suppress(queue.Empty):
            while True:
                if ticket := self._queue.get_nowait():
                    self._report(ticket, self._dead(death))

    def _dead(self, death: Death) -> Failure:
        fix = "restart the prefill process; its log has the traceback"
        return Failure(FailureReason.INTERNAL, death.text, self._worker_id, "staging", fix)

    def _begin_next(self) -> bool:
        """Begin one more, waiting for it only where nothing is under way; whether there was one that could begin."""
        if len(self._under_way) >= MAX_UNDER_WAY:
            return False
        ticket, self._next = self._next, None
        if ticket is None and not self._ended:
            try:
                ticket = self._take()
            except queue.Empty:
                return False
            self._ended = ticket is None
        if ticket is None:
            return False
        self._current = ticket
        has_begun = True
        try:
            has_begun = self._begin(ticket)
        except BackendError as error:
            self._report(ticket, Failure(FailureReason.BACKEND, str(error), self._worker_id, "staging"))
        except Exception as error:  # a bug of ours ends this ticket, not the thread
            log.exception("packing for %s failed", self._worker_id)
            self._report(ticket, Failure(FailureReason.INTERNAL, f"{type(error).__name__}: {error}"))
        self._current = None
        return has_begun

    def _take(self) -> Ticket | None:
        """The next one, waiting for it only where nothing is under way. Raises `queue.Empty`."""
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            if self._under_way:
                raise
        self._first = self._queue.get()
        return self._first

    def _begin(self, ticket: Ticket) -> bool:
        if ticket.slot is None and not ticket.over:
            if not self._under_way:
                left = ticket.asked_at + self._timeout_s - self._clock()
                ticket.slot = self._arena.slots.take(left, lambda: ticket.over)
            else:
                ticket.slot = self._arena.slots.try_take()
                if ticket.slot is None:
                    self._next = ticket
                    return False
        prepared, self._prepared = self._prepared, None
        if ticket.slot is None or ticket.over:
            self._report(ticket, None if ticket.over else self._no_slot())
            return True
        if self._arena.area.memory is MemoryKind.HOST:
            copier, batch = self._copies(ticket.job, ticket.slot)
            copier.copy(batch, lambda: ticket.over)  # by this thread, which can thus stop in between
            self._under_way.append((ticket, None))
            return True
        if prepared is None:
            copier, batch = self._copies(ticket.job, ticket.slot)
            prepared = copier.prepare(batch)
        if self._under_way and self._under_way[0][0] is self._first:
            self._next, self._prepared = ticket, prepared
            return False
        try:
            self._under_way.append((ticket, prepared.start()))
        except BaseException as error:
            if not isinstance(error, Exception):
                ticket.slot = None  # nobody can say whether something copies into it: it is given to nobody
            raise
        return True

    def _copies(self, job: StageJob, slot: int) -> tuple[Copier, PullBatch]:
        """What a job copies into a slot, and who. The copier is made with the first: on a device it takes memory."""
        area = self._arena.area
        self._copier = self._copier or open_copier(area.memory, area.device)
        return self._copier, job.copies(area.address(slot), self._copier.wants_runs)

    def _is_over(self) -> bool:
        _, copying = self._under_way[0]
        return copying is None or copying.is_over

    def _finish(self) -> None:
        """Wait for the end of the first that is under way."""
        ticket, copying = self._under_way[0]
        failure = None
        try:
            if copying:
                copying.wait()
        except BackendError as error:
            failure = Failure(FailureReason.BACKEND, str(error), self._worker_id, "staging")
        self._under_way.popleft()
        self._report(ticket, failure)
        if ticket is self._first:
            self._first = None
            if copying:
                time.sleep(YIELD_S)

    def _report(self, ticket: Ticket, failure: Failure | None) -> None:
        try:
            self._done(ticket, failure)
        except Exception:  # a bug of ours: the reader's own deadline ends its request, and others are packed for
            log.exception("a packed piece for %s could not be reported", self._worker_id)

    def _no_slot(self) -> Failure:
        text = f"none of the {self._arena.slots.num_slots} staging slots came free within {self._timeout_s:g} s"
        fix = "raise PDLINK_STAGING_SLOTS on prefill, or PDLINK_STAGING_TIMEOUT_S on both"
        return Failure(FailureReason.TIMEOUT, text, self._worker_id, "staging", fix)
