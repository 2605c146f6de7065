"""Owns the thread that pulls from one prefill rank, because a backend's calls may block. It decides nothing.

A pull is reported once, when it is quiet: with what went wrong, or None. Until then its destination pages are in use.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pdlink.backends.base import Backend, Peer, PullHandle, PullStatus, Settled
from pdlink.backends.registry import Choice, choose
from pdlink.bootstrap.messages import RankInfo
from pdlink.decode.actions import Pull
from pdlink.errors import BackendError, PeerGone, RegionError
from pdlink.layout.regions import Region
from pdlink.transfer.descriptors import PullBatch
from pdlink.transfer.digests import first_difference, page_digests
from pdlink.transfer.failure import Failure, FailureReason

log = logging.getLogger("pdlink.decode")

IDLE_SLEEP_S = 50e-6
SETTLE_SLEEP_S = 1e-3
FENCE_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class PullJob:
    """A pull to make. `stop` is set when its request is draining.

    On the puller's thread, `failing` is called when it has gone wrong but bytes may still land, and `done` once, when
    it is quiet.
    """

    pull: Pull
    regions: tuple[Region, ...]
    stop: threading.Event
    failing: Callable[[Failure], None]
    done: Callable[[Failure | None], None]


@dataclass(slots=True)
class PullStats:
    """What one puller did. Written by its thread only."""

    num_pulls: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0
    rejected: Mapping[str, str] = field(default_factory=dict)
    backend: str = ""


class Puller:
    """One thread, one prefill rank. It connects on the first job; `close` twice is fine."""

    def __init__(self, rank: RankInfo, backends: Mapping[str, Backend], settle_timeout_s: float) -> None:
        self.rank = rank
        self.stats = PullStats()
        self._backends = backends
        self._settle_timeout_s = settle_timeout_s
        self._jobs: queue.SimpleQueue[PullJob | None] = queue.SimpleQueue()
        self._choice: Choice | None = None
        self._thread = threading.Thread(target=self._run, name=f"pdlink-pull-{rank.worker_id}", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, job: PullJob) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        """End after the jobs that are queued; returns at once. Callers stop their requests first."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end after `stop`; whether it has come."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                failure = self._pull(job)
            except Exception as error:  # a bug of ours or of a backend ends this pull, not the thread
                log.exception("pull from %s failed", self.rank.worker_id)
                failure = self._cause(error)
            try:
                job.done(failure)
            except Exception:  # a bug of ours: the request's own deadlines end it, and other requests go on
                log.exception("the end of a pull from %s could not be reported", self.rank.worker_id)
        if self._choice:
            self._choice.backend.disconnect(self._peer(self._choice.backend))

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
        handle = self._submit(backend, job.pull.batch)
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
