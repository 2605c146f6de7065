"""Owns the thread that pulls from one prefill rank, because a backend's calls may block. It decides nothing.

A pull is reported once, when it is quiet: with what went wrong, or None. Until then its destination pages are in use.

Small pulls over a backend that works in `poll` do not take the thread: a copy of some microseconds costs less than the
two thread switches around it, of which a request from many ranks would pay many. They run on the control loop.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

from pdlink.backends.base import Backend
from pdlink.bootstrap.messages import RankInfo
from pdlink.config import Settings
from pdlink.control.frames import Credit
from pdlink.control.loop import PART
from pdlink.decode.failures import RESTART
from pdlink.decode.pull_check import find_wrong
from pdlink.decode.pull_job import PullEnd, PullJob
from pdlink.decode.rank_wire import JobWire, RankWire
from pdlink.decode.staged_pull import StagedPull
from pdlink.decode.way_picker import WayPicker
from pdlink.errors import BackendError, LimitReached, PeerGone
from pdlink.events import Events
from pdlink.threads import Death, OnDeath, SupervisedThread
from pdlink.transfer.digests import Digester, page_digests
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.timings import PullTimings
from pdlink.transfer.ways import Way

log = logging.getLogger("pdlink.decode")

INLINE_BYTES = 256 << 10
"""Up to here a pull may run on the control loop; copying it takes less than 0.1 ms."""

CallSoon: TypeAlias = Callable[[Callable[[], None]], bool]


@dataclass(slots=True)
class PullStats:
    """What one puller did. Written by its thread only."""

    num_pulls: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0
    rejected: Mapping[str, str] = field(default_factory=dict)
    backend: str = ""


class Puller:
    """One thread, one prefill rank. It starts and connects with the first job; `stop` twice is fine.

    `call_soon` runs a call on the control loop's thread, or says that it will not. When the thread dies, its jobs fail
    once they are quiet, those that come later at once, and `on_death` is told.
    """

    def __init__(
        self,
        rank: RankInfo,
        backends: Mapping[str, Backend],
        settings: Settings,
        call_soon: CallSoon,
        ways: WayPicker,
        events: Events,
        owner: str = "decode",
        on_death: OnDeath | None = None,
        digest: Digester = page_digests,
    ) -> None:
        """`owner` is the part of the process that the thread belongs to; `digest` is used on it."""
        self.rank = rank
        self.ways = ways
        self.stats = PullStats()
        self._events = events
        self._call_soon = call_soon
        self._turn = threading.Lock()
        """Held by the thread that uses the backend: one at a time for a peer."""
        self._idle = threading.Condition()
        self._num_inline = 0
        self._handed: dict[PullJob, None] = {}
        """Left to the thread and not reported yet, the oldest first."""
        self._owed: Credit | None = None
        """Slots of the owner that the newest pull has read and not given back yet."""
        self._ended = False
        self._jobs: queue.SimpleQueue[PullJob | None] = queue.SimpleQueue()
        self._tickets = itertools.count(1)
        self._digest = digest
        self._wire = RankWire(rank, backends, settings.drain_timeout_s)
        self._owner = owner
        self._told_of_death = on_death
        self._thread = SupervisedThread(
            self._run,
            f"pdlink-pull-{rank.worker_id}",
            owner,
            events=events,
            on_death=self._die,
            at_end=self._let_go,
            was_asked=lambda: self._ended,
        )

    @property
    def is_idle(self) -> bool:
        """Whether a pull that came now would begin at once."""
        return not self._handed

    @property
    def num_under_way(self) -> int:
        """Pulls that were handed in and not reported yet."""
        return len(self._handed) + self._num_inline

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection over a transport, which the first pull makes."""
        return self._wire.choice is not None

    @property
    def is_over(self) -> bool:
        """Whether nothing of it can land any more: its thread has ended, the wire was let go of, and the control loop
        has none of its pulls."""
        return self._ended and not self._thread.is_alive and self._num_inline == 0

    @property
    def death(self) -> Death | None:
        """How the thread ended, where nobody asked it to."""
        return self._thread.death

    def submit(self, job: PullJob) -> None:
        if self._is_small(job):
            with self._idle:
                self._num_inline += 1
            # It is not staged, and an answer that comes before it runs goes back: none may be expected after that.
            inline = replace(job, ahead=None) if job.ahead else job
            if self._call_soon(partial(self._run_inline, inline)):
                return
            self._end_inline()
        if failure := self._enqueue(job):
            self._report(job, failure)

    def stop(self) -> None:
        """End after the jobs that are queued; returns at once. Callers stop their requests first."""
        with self._idle:
            if not self._thread.has_started:
                self._ended = True
        self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end after `stop`, that of pulls on the control loop included; whether it has come."""
        self._thread.join(timeout_s)
        with self._idle:
            quiet = self._idle.wait_for(lambda: self._num_inline == 0, timeout_s)
        return quiet and not self._thread.is_alive

    def _enqueue(self, job: PullJob) -> Failure | None:
        """Leave a job to the thread, or say why there is none."""
        with self._idle:
            if self._ended:
                return self._no_thread()
            if not self._thread.has_started:
                try:
                    self._thread.start()
                except LimitReached as error:
                    return Failure(FailureReason.LIMIT, str(error), self.rank.worker_id)
            # Slots of the owner are kept for a pull that begins now. One that waits its turn must hold none: those in
            # front of it may wait for them. Their answers are not expected then, and go back as they come.
            handed = replace(job, ahead=None) if self._handed else job
            for ticket in handed.tickets_ahead():
                self.ways.inbox.expect(job.key, ticket)
            self._handed[handed] = None
            self._jobs.put(handed)
            return None

    def _no_thread(self) -> Failure:
        if self.death:
            return Failure(FailureReason.INTERNAL, self.death.text, self.rank.worker_id, fix=RESTART)
        return Failure(FailureReason.ABORTED, "the link is closed", self.rank.worker_id)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._run_queued(job)
        with self._idle:
            self._ended = True
        while not self._jobs.empty():  # what came from the control loop while this thread was told to end
            if job := self._jobs.get():
                self._run_queued(job)

    def _let_go(self) -> None:
        with self._turn, ExitStack() as stack:
            stack.callback(self._wire.disconnect)
            stack.callback(self.ways.close)

    def _die(self, death: Death) -> None:
        """Fail what was handed to the thread, wherever it was when that died. It is quiet: nothing leaves `_outcome`
        before that, whatever was raised."""
        with self._idle:
            self._ended = True
            jobs, self._handed = list(self._handed), {}
        for job in jobs:
            self._report(job, self._no_thread())  # first, so that nothing below keeps it from anybody
        if self._told_of_death:
            self._told_of_death(death)
        for job in jobs:
            self.ways.inbox.give_back(job.key, job.tickets_ahead(), job.send)

    def _run_queued(self, job: PullJob) -> None:
        with self._turn:
            end = self._outcome(job)
        end.tell()  # before the report, after which the request may be over
        self.ways.inbox.give_back(job.key, job.tickets_ahead(), job.send)
        with self._idle:
            del self._handed[job]
        self._report(job, end.failure)
        if self._owed:  # after the report, which somebody waits for
            job.send(self._owed)
            self._owed = None

    def _is_small(self, job: PullJob) -> bool:
        choice = self._wire.choice
        return (
            choice is not None
            and not self.ways.may_stage(job.pull, choice.backend)
            and choice.backend.capabilities.works_in_poll
            and job.pull.digests is None
            and job.pull.batch.nbytes <= INLINE_BYTES
        )

    def _run_inline(self, job: PullJob) -> None:
        """On the control loop: pull now, unless the thread is at work for this peer; then it waits its turn there."""
        end = PullEnd(None)
        is_over = True
        try:
            if self._turn.acquire(blocking=False):
                try:
                    end = self._outcome(job)
                finally:
                    self._turn.release()
            else:
                end = PullEnd(self._enqueue(job))
                is_over = end.failure is not None
        except BaseException as error:  # the loop's thread ends with it
            end = PullEnd(self._cause(error))
            raise
        finally:
            if is_over and not end.failure and not job.stop.is_set():
                # Owners are asked for their verdicts first, which this very thread hears: the request is not over yet.
                self._report(job, None)
                end.tell()
            elif is_over:
                end.tell()
                self._report(job, end.failure)
            self._end_inline()

    def _end_inline(self) -> None:
        with self._idle:
            self._num_inline -= 1
            self._idle.notify_all()

    def _outcome(self, job: PullJob) -> PullEnd:
        try:
            return self._pull(job)
        except Exception as error:  # a bug of ours or of a backend ends this pull, not the thread
            log.exception("pull from %s failed", self.rank.worker_id)
            return PullEnd(self._cause(error))

    def _report(self, job: PullJob, failure: Failure | None) -> None:
        try:
            job.done(failure)
        except Exception:  # a bug of ours: the request's own deadlines end it, and other requests go on
            log.exception("the end of a pull from %s could not be reported", self.rank.worker_id)

    def _pull(self, job: PullJob) -> PullEnd:
        if job.stop.is_set():
            return PullEnd(Failure(FailureReason.ABORTED, "stopped before it was posted", self.rank.worker_id))
        if not job.pull.batch.moves:
            return PullEnd(None)
        timings, started = PullTimings(), time.perf_counter()
        try:
            failure = self._move(job, timings)
        except BackendError as error:
            return self._end(job, timings, time.perf_counter() - started, 0, self._cause(error))
        self.stats.num_pulls += 1
        self.stats.num_bytes += job.pull.batch.nbytes
        took_s = time.perf_counter() - started
        self.stats.busy_s += took_s
        num_bytes = 0 if failure else job.pull.batch.nbytes
        return self._end(job, timings, took_s, num_bytes, failure or self._verify(job, timings))

    def _move(self, job: PullJob, timings: PullTimings) -> Failure | None:
        choice = self._wire.connected()
        backend = choice.backend
        self.stats.backend, self.stats.rejected = backend.name, choice.rejected
        used = (self._wire, backend, job.stop, job.failing, self._cause)
        if failure := self.ways.calibrate(job.pull, backend, JobWire(*used, PullTimings())):
            return failure
        wire = JobWire(*used, timings)
        if self.ways.pick(job.pull, backend).way is not Way.STAGED:
            return wire.finish(wire.start(job.pull.batch))
        assert self.ways.staging is not None
        calls = (job.send, job.stop.is_set, wire)
        rest = (timings, self.ways.copier(), job.ahead)
        pull = StagedPull(self.ways.staging, job.pull, job.key, self._tickets, *calls, *rest)
        failure = pull.run()
        self._owed = pull.owed
        return failure

    def _end(
        self, job: PullJob, timings: PullTimings, took_s: float, num_bytes: int, failure: Failure | None
    ) -> PullEnd:
        """Of a pull that was begun, of which `num_bytes` have landed. `took_s` is without `verify_s`."""
        way = self.ways.last.way.value if self.ways.last else ""
        told = job.facts(self.rank.worker_id, self.stats.backend, way, timings)
        reason = failure.reason.value if failure else ""
        tell = partial(self._events.emit, "pull.end", **told, reason=reason, num_bytes=num_bytes, took_s=took_s)
        return PullEnd(failure, tell)

    def _cause(self, error: BaseException) -> Failure:
        if not isinstance(error, Exception):  # it ends the thread, which is what the request must hear
            on_loop = not self._thread.is_current
            name, owner = (threading.current_thread().name, PART) if on_loop else (self._thread.name, self._owner)
            return Failure(FailureReason.INTERNAL, Death(name, owner, error).text, self.rank.worker_id, fix=RESTART)
        if not isinstance(error, BackendError):
            text = f"{type(error).__name__}: {error}"
            return Failure(FailureReason.INTERNAL, text, self.rank.worker_id)
        reason = FailureReason.PEER_GONE if isinstance(error, PeerGone) else FailureReason.BACKEND
        return Failure(reason, str(error), self.rank.worker_id)

    def _verify(self, job: PullJob, timings: PullTimings) -> Failure | None:
        began = time.perf_counter()
        try:
            return find_wrong(job, self.rank.worker_id, self._digest)
        except BackendError as error:
            return self._cause(error)
        finally:
            timings.verify_s = time.perf_counter() - began
