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
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from pdlink.backends.base import Backend, Peer, PullHandle, PullStatus, Settled
from pdlink.backends.registry import Choice, choose
from pdlink.bootstrap.messages import RankInfo
from pdlink.config import Settings
from pdlink.control.frames import Body
from pdlink.decode.actions import Pull
from pdlink.decode.staged_pull import StagedPull
from pdlink.decode.way_picker import WayPicker
from pdlink.errors import BackendError, PeerGone, RegionError
from pdlink.layout.regions import Region
from pdlink.transfer.descriptors import PullBatch
from pdlink.transfer.digests import first_difference, page_digests
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.ways import Way

log = logging.getLogger("pdlink.decode")

IDLE_SLEEP_S = 50e-6
SETTLE_SLEEP_S = 1e-3
FENCE_RETRY_S = 1.0
INLINE_BYTES = 256 << 10
"""Up to here a pull may run on the control loop; copying it takes less than 0.1 ms."""

CallSoon: TypeAlias = Callable[[Callable[[], None]], None]


@dataclass(frozen=True, slots=True, eq=False)
class PullJob:
    """A pull to make, of the attempt `key` (transfer id, attempt). `stop` is set when its request is draining.

    `send` takes frames about the request to its owner.

    On the thread that pulls, `failing` is called when it has gone wrong but bytes may still land, and `done` once, when
    it is quiet.
    """

    pull: Pull
    regions: tuple[Region, ...]
    stop: threading.Event
    failing: Callable[[Failure], None]
    done: Callable[[Failure | None], None]
    key: tuple[str, int]
    send: Callable[[Body], None]


@dataclass(slots=True)
class PullStats:
    """What one puller did. Written by its thread only."""

    num_pulls: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0
    rejected: Mapping[str, str] = field(default_factory=dict)
    backend: str = ""


class Puller:
    """One thread, one prefill rank. It connects on the first job; `close` twice is fine.

    `call_soon` runs a call on the control loop's thread.
    """

    def __init__(
        self, rank: RankInfo, backends: Mapping[str, Backend], settings: Settings, call_soon: CallSoon, ways: WayPicker
    ) -> None:
        self.rank = rank
        self.ways = ways
        self.stats = PullStats()
        self._backends = backends
        self._settle_timeout_s = settings.drain_timeout_s
        self._call_soon = call_soon
        self._turn = threading.Lock()
        """Held by the thread that uses the backend: one at a time for a peer."""
        self._idle = threading.Condition()
        self._num_inline = 0
        self._ended = False
        self._jobs: queue.SimpleQueue[PullJob | None] = queue.SimpleQueue()
        self._tickets = itertools.count(1)
        self._choice: Choice | None = None
        self._thread = threading.Thread(target=self._run, name=f"pdlink-pull-{rank.worker_id}", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, job: PullJob) -> None:
        if self._is_small(job):
            with self._idle:
                self._num_inline += 1
            self._call_soon(partial(self._run_inline, job))
        elif not self._enqueue(job):
            self._report(job, Failure(FailureReason.ABORTED, "the link is closed", self.rank.worker_id))

    def stop(self) -> None:
        """End after the jobs that are queued; returns at once. Callers stop their requests first."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end after `stop`, that of pulls on the control loop included; whether it has come."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        with self._idle:
            quiet = self._idle.wait_for(lambda: self._num_inline == 0, timeout_s)
        return quiet and not self._thread.is_alive()

    def _enqueue(self, job: PullJob) -> bool:
        """Leave a job to the thread; False when that has ended."""
        with self._idle:
            if not self._ended:
                self._jobs.put(job)
            return not self._ended

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._run_job(job)
        with self._idle:
            self._ended = True
        while not self._jobs.empty():  # what came from the control loop while this thread was told to end
            if job := self._jobs.get():
                self._run_job(job)
        with self._turn:
            if self._choice:
                self._choice.backend.disconnect(self._peer(self._choice.backend))

    def _run_job(self, job: PullJob) -> None:
        with self._turn:
            failure = self._outcome(job)
        self._report(job, failure)

    def _is_small(self, job: PullJob) -> bool:
        choice = self._choice
        return (
            choice is not None
            and not self.ways.may_stage(job.pull, choice.backend)
            and choice.backend.capabilities.works_in_poll
            and job.pull.digests is None
            and job.pull.batch.nbytes <= INLINE_BYTES
        )

    def _run_inline(self, job: PullJob) -> None:
        """On the control loop: pull now, unless the thread is at work for this peer; then it waits its turn there."""
        try:
            if self._turn.acquire(blocking=False):
                try:
                    failure = self._outcome(job)
                finally:
                    self._turn.release()
                self._report(job, failure)
            elif not self._enqueue(job):
                self._run_job(job)
        finally:
            with self._idle:
                self._num_inline -= 1
                self._idle.notify_all()

    def _outcome(self, job: PullJob) -> Failure | None:
        try:
            return self._pull(job)
        except Exception as error:  # a bug of ours or of a backend ends this pull, not the thread
            log.exception("pull from %s failed", self.rank.worker_id)
            return self._cause(error)

    def _report(self, job: PullJob, failure: Failure | None) -> None:
        try:
            job.done(failure)
        except Exception:  # a bug of ours: the request's own deadlines end it, and other requests go on
            log.exception("the end of a pull from %s could not be reported", self.rank.worker_id)

    def _pull(self, job: PullJob) -> Failure | None:
        if job.stop.is_set():
            return Failure(FailureReason.ABORTED, "stopped before it was posted", self.rank.worker_id)
        if not job.pull.batch.moves:
            return None
        started = time.monotonic()
        try:
            failure = self._move(job)
        except BackendError as error:
            return self._cause(error)
        self.stats.num_pulls += 1
        self.stats.num_bytes += job.pull.batch.nbytes
        self.stats.busy_s += time.monotonic() - started
        return failure or self._verify(job)

    def _move(self, job: PullJob) -> Failure | None:
        backend = self._connected()
        wire = _JobWire(self, backend, job)
        if failure := self.ways.calibrate(job.pull, backend, wire):
            return failure
        if self.ways.pick(job.pull, backend).way is not Way.STAGED:
            return wire.finish(wire.start(job.pull.batch))
        assert self.ways.staging is not None
        return StagedPull(self.ways.staging, job.pull, job.key, self._tickets, job.send, job.stop.is_set, wire).run()

    def _finish(self, backend: Backend, handle: PullHandle, job: PullJob) -> Failure | None:
        """Wait for the end of a posted pull; it is quiet then, also when this raises."""
        try:
            while (status := backend.poll(handle)) is PullStatus.PENDING and not job.stop.is_set():
                if not backend.capabilities.works_in_poll:
                    time.sleep(IDLE_SLEEP_S)
        except Exception as error:  # whatever it is, it promises nothing about what may still land
            job.failing(self._cause(error))
            self._quieten(backend, handle)
            raise
        if status is PullStatus.DONE:
            return None
        if status is PullStatus.FAILED:
            failure = self._cause(handle.error or BackendError(f"backend {backend.name} gives no reason"))
            job.failing(failure)
        else:
            failure = Failure(FailureReason.ABORTED, "stopped by the request", self.rank.worker_id)
        self._quieten(backend, handle)
        return failure

    def _cause(self, error: Exception) -> Failure:
        if not isinstance(error, BackendError):
            text = f"{type(error).__name__}: {error}"
            return Failure(FailureReason.INTERNAL, text, self.rank.worker_id)
        reason = FailureReason.PEER_GONE if isinstance(error, PeerGone) else FailureReason.BACKEND
        return Failure(reason, str(error), self.rank.worker_id)

    def _submit(self, backend: Backend, batch: PullBatch) -> PullHandle:
        """Post a pull. A link that another puller of this process has taken down is made again, once."""
        try:
            return backend.submit(batch)
        except PeerGone:
            backend.connect(self._peer(backend))
            return backend.submit(batch)
        except RegionError:  # found before a byte was posted
            raise
        except Exception:
            self._fence(backend)
            raise

    def _quieten(self, backend: Backend, handle: PullHandle) -> None:
        """Return only when nothing of the pull can land any more: settle, else fence the peer."""
        give_up = time.monotonic() + self._settle_timeout_s
        try:
            while backend.settle(handle) is Settled.NOT_QUIET:
                if time.monotonic() >= give_up:
                    self._fence(backend)
                    return
                time.sleep(SETTLE_SLEEP_S)
        except Exception:  # an answer that does not come is not a quiet one
            log.exception("backend %s cannot settle a pull from %s", backend.name, self.rank.worker_id)
            self._fence(backend)

    def _fence(self, backend: Backend) -> None:
        """Break the link. Where even that fails, the pages stay in use until it does not."""
        while True:
            try:
                broken = backend.fence(self._peer(backend))
            except Exception:
                log.exception("backend %s cannot fence %s; trying again", backend.name, self.rank.worker_id)
                time.sleep(FENCE_RETRY_S)
                continue
            log.warning("fenced %s to make a pull quiet", ", ".join(broken))
            self._choice = None
            return

    def _connected(self) -> Backend:
        if self._choice is None:
            self._choice = choose(
                self._backends, self.rank.worker_id, self.rank.incarnation, dict(self.rank.transports)
            )
            self.stats.backend, self.stats.rejected = self._choice.backend.name, self._choice.rejected
        return self._choice.backend

    def _peer(self, backend: Backend) -> Peer:
        return Peer(self.rank.worker_id, self.rank.incarnation, self.rank.transports[backend.name])

    def _verify(self, job: PullJob) -> Failure | None:
        if job.pull.digests is None:
            return None
        wrong = first_difference(page_digests(job.regions, job.pull.pages), job.pull.digests)
        if wrong is None:
            return None
        region, page = job.regions[wrong[0]], int(job.pull.pages[wrong[1]])
        text = (
            f"digest of {region.component!r} layer {region.layer}, page {page} differs from what {self.rank.worker_id} "
            "published"
        )
        fix = "look for an engine that writes published pages, or for a faulty link"
        return Failure(FailureReason.DIGEST, text, self.rank.worker_id, fix=fix)


@dataclass(frozen=True, slots=True)
class _JobWire:
    """The puller's backend as the pieces of one staged pull use it."""

    puller: Puller
    backend: Backend
    job: PullJob

    def start(self, batch: PullBatch) -> PullHandle:
        return self.puller._submit(self.backend, batch)

    def finish(self, handle: PullHandle) -> Failure | None:
        return self.puller._finish(self.backend, handle, self.job)

    def drop(self, handle: PullHandle) -> None:
        self.puller._quieten(self.backend, handle)
