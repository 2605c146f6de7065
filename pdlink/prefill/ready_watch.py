"""Owns the thread that looks whether a device has computed what an engine has published, and on which pages are
digested for readers that come late. It publishes and digests nothing: a sender does, when it is told to look.
"""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from pdlink.errors import LimitReached
from pdlink.events import Events
from pdlink.threads import Death, SupervisedThread
from pdlink.transfer.failure import Failure, FailureReason

log = logging.getLogger("pdlink.prefill")

POLL_S = 200e-6
"""Between two looks, while there is something to wait for."""
JOIN_S = 5.0


class DeviceEvent(Protocol):
    """What an engine has recorded after the work that writes the pages, such as a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether that work is done. Must not block; any thread may call it."""


class Waiter(Protocol):
    """A request with publications that wait for a device, or for digests."""

    def look_ready(self) -> bool:
        """Publish what is computed, and digest what is to be; whether something still waits."""

    def fail(self, cause: Failure) -> None: ...


class ReadyWatch:
    """One thread for all requests of a worker, started when it is first needed. `close` twice is fine. When it dies,
    the requests that wait fail, and so does each that comes later."""

    def __init__(self, worker_id: str, events: Events | None = None) -> None:
        self._worker_id = worker_id
        self._events = events
        self._waiters: set[Waiter] = set()
        self._looked_at: set[Waiter] = set()
        """Taken out of the others for the round that runs."""
        self._changed = threading.Condition()
        self._closed = False
        self._thread: SupervisedThread | None = None

    def add(self, waiter: Waiter) -> None:
        """Look at it until nothing of it waits, or fail it where nobody can. Any thread, under any lock that is no
        trouble to `fail`: returns at once."""
        failure = None
        with self._changed:
            if self._closed:
                return
            try:
                self._thread = self._thread or self._start()
            except LimitReached as error:
                failure = Failure(FailureReason.LIMIT, str(error), self._worker_id)
            else:
                if self._thread.death:
                    failure = self._dead(self._thread.death)
                else:
                    self._waiters.add(waiter)
                    self._changed.notify()
        if failure:
            waiter.fail(failure)

    def close(self) -> None:
        """End the thread; it looks at nothing when this returns. Not under a lock that a waiter takes."""
        with self._changed:
            self._closed = True
            self._waiters.clear()
            self._changed.notify()
            thread = self._thread
        if thread and not thread.join(JOIN_S):
            log.error("a device event of %s does not answer", self._worker_id)

    def _start(self) -> SupervisedThread:
        name, owner = f"pdlink-ready-{self._worker_id}", f"prefill {self._worker_id}"
        thread = SupervisedThread(
            self._run, name, owner, events=self._events, on_death=self._die, was_asked=lambda: self._closed
        )
        thread.start()
        return thread

    def _die(self, death: Death) -> None:
        with self._changed:
            waiters, self._waiters = self._waiters | self._looked_at, set()
        for one in waiters:
            one.fail(self._dead(death))

    def _dead(self, death: Death) -> Failure:
        fix = "restart the prefill process; its log has the traceback"
        return Failure(FailureReason.INTERNAL, death.text, self._worker_id, fix=fix)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiters)
                if self._closed:
                    return
                # Taken out first: one that is added again while it is looked at stays.
                waiters, self._waiters = self._waiters, set()
                self._looked_at = waiters
            still = {one for one in waiters if self._look(one)}
            with self._changed:
                self._looked_at = set()
                self._waiters |= still
                if self._waiters and not self._closed:
                    self._changed.wait(POLL_S)

    def _look(self, waiter: Waiter) -> bool:
        try:
            return waiter.look_ready()
        except Exception as error:  # a bug of ours ends this request, not the thread
            log.exception("publications of %s could not be looked at", self._worker_id)
            waiter.fail(Failure(FailureReason.INTERNAL, f"{type(error).__name__}: {error}", self._worker_id))
            return False
