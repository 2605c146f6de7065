"""Owns the threads on which a prefill rank publishes, so that sglang's scheduler waits for no event, lock or digest.

Jobs of one request run in their order, on one thread. A job waits for the CUDA event that guards its page ids, while
jobs of other requests go on; the event that guards the pages themselves is the business of pdlink's sender.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pdlink.errors import PdlinkError
from pdlink.threads import Death, OnDeath, SupervisedThread
from pdlink.transfer.failure import Failure, FailureReason

log = logging.getLogger("pdlink.sglang")

NUM_THREADS = 4
JOIN_TIMEOUT_S = 5.0
POLL_S = 200e-6
"""Between two looks at events, while there is one to wait for."""


class Event(Protocol):
    """What is asked of a `torch.cuda.Event`."""

    def query(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class PublishJob:
    """One chunk. `publish` runs when `event`, if there is one, has happened; `fail` is told once when it cannot."""

    event: Event | None
    publish: Callable[[], None]
    fail: Callable[[Failure], None]


class PublishOrder:
    """The chunks of one request that have not been published, in their order. Made by `Publisher.order`."""

    __slots__ = ("jobs", "lane")

    def __init__(self, lane: _Lane) -> None:
        self.lane = lane
        self.jobs: deque[tuple[float, PublishJob]] = deque()
        """(when it is given up, the job). Under the lane's lock."""


class Publisher:
    """`NUM_THREADS` threads; `submit` returns at once. `close` twice is fine, and drops what has not begun.

    When a thread dies, the requests that it publishes for fail, and so do later ones that it would publish for, which
    are told by whoever submits; `on_death` is told too.
    """

    def __init__(self, event_timeout_s: float, on_death: OnDeath | None = None) -> None:
        self._event_timeout_s = event_timeout_s
        self._lanes = [_Lane(number, on_death) for number in range(NUM_THREADS)]
        self._next = itertools.cycle(self._lanes)

    def order(self) -> PublishOrder:
        """A place for the chunks of one request. Requests take the threads in turn: their ids may have a pattern."""
        return PublishOrder(next(self._next))

    def submit(self, order: PublishOrder, job: PublishJob) -> None:
        order.lane.add(order, job, time.monotonic() + self._event_timeout_s)

    def close(self) -> None:
        for lane in self._lanes:
            lane.stop()
        for lane in self._lanes:
            lane.join()


class _Lane:
    """One thread, and the requests that it publishes for."""

    def __init__(self, number: int, on_death: OnDeath | None) -> None:
        self._told_of_death = on_death
        self._changed = threading.Condition()
        self._orders: set[PublishOrder] = set()
        """Those that have jobs."""
        self._closed = False
        self._thread = SupervisedThread(
            self._run,
            f"pdlink-publish-{number}",
            "sglang publisher",
            on_death=self._die,
            was_asked=lambda: self._closed,
        )
        self._thread.start()

    def add(self, order: PublishOrder, job: PublishJob, give_up: float) -> None:
        with self._changed:
            death = self._thread.death
            if death is None:
                order.jobs.append((give_up, job))
                self._orders.add(order)
                self._changed.notify()
        if death:
            job.fail(_failure(death))

    def stop(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def join(self) -> None:
        self._thread.join(JOIN_TIMEOUT_S)

    def _die(self, death: Death) -> None:
        with self._changed:
            orders, self._orders = self._orders, set()
            jobs = [job for order in orders for _, job in order.jobs]
            for order in orders:
                order.jobs.clear()
        if self._told_of_death:
            self._told_of_death(death)
        for job in jobs:
            try:
                job.fail(_failure(death))
            except Exception:  # the others must hear of it all the same
                log.exception("a request could not be told that its publishing thread has died")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._orders)
                if self._closed:
                    return
                orders = tuple(self._orders)
            # Every request is looked at before the pause, so that none waits for the event of another one.
            num_over = sum(self._advance(order) for order in orders)
            if not num_over:
                with self._changed:
                    if not self._closed:
                        self._changed.wait(POLL_S)

    def _advance(self, order: PublishOrder) -> bool:
        """Run the first job of a request if it can run or has failed; whether it is gone."""
        with self._changed:
            if self._closed:
                return True
            give_up, job = order.jobs[0]
        if not _is_over(job, give_up):
            return False
        with self._changed:
            order.jobs.popleft()
            if not order.jobs:
                self._orders.discard(order)
        return True


def _failure(death: Death) -> Failure:
    return Failure(FailureReason.INTERNAL, death.text, fix="restart the prefill server; its log has the traceback")


def _is_over(job: PublishJob, give_up: float) -> bool:
    """Publish if the event has happened. False: ask again.

    The event is asked rather than waited for, because a wait inside CUDA has no end.
    """
    try:
        if job.event is not None and not job.event.query():
            if time.monotonic() < give_up:
                return False
            text = "the page ids of a chunk were not there in time after its send (PDLINK_TRANSFER_TIMEOUT_S)"
            job.fail(Failure(FailureReason.TIMEOUT, text, fix="look for work on the engine's stream that does not end"))
            return True
        job.publish()
    except PdlinkError as error:
        job.fail(Failure(FailureReason.PLAN, str(error)))
    except Exception as error:  # a thread boundary: the request must learn of it, and the next one must run
        log.exception("publishing failed")
        job.fail(Failure(FailureReason.INTERNAL, f"{type(error).__name__}: {error}"))
    return True
