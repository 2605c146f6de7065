"""Owns the backend by which one prefill rank is reached: which one it is, posts over it, and the proof that nothing of
a post can land any more. When to post and what becomes of a pull is its puller's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from pdlink.backends.base import Backend, Peer, PullHandle, PullStatus, Settled
from pdlink.backends.registry import Choice, choose
from pdlink.bootstrap.messages import RankInfo
from pdlink.errors import BackendError, PeerGone, RegionError
from pdlink.transfer.descriptors import PullBatch
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.timings import PullTimings

log = logging.getLogger("pdlink.decode")

IDLE_SLEEP_S = 50e-6
SETTLE_SLEEP_S = 1e-3
FENCE_RETRY_S = 1.0


class RankWire:
    """One thread at a time uses it. It connects when it is first asked to, and again after a fence."""

    def __init__(self, rank: RankInfo, backends: Mapping[str, Backend], settle_timeout_s: float) -> None:
        self.rank = rank
        self.choice: Choice | None = None
        """The backend, while there is a connection over it."""
        self._backends = backends
        self._settle_timeout_s = settle_timeout_s

    def connected(self) -> Choice:
        """Connect if need be (blocks). Raises `BackendUnavailable` with what each backend said."""
        if self.choice is None:
            rank = self.rank
            self.choice = choose(self._backends, rank.worker_id, rank.incarnation, dict(rank.transports))
        return self.choice

    def disconnect(self) -> None:
        """Let go of the rank. Every pull from it is quiet."""
        if self.choice:
            self.choice.backend.disconnect(self._peer(self.choice.backend))

    def submit(self, backend: Backend, batch: PullBatch) -> PullHandle:
        """Post a pull. A link that another puller of this process has taken down is made again, once."""
        try:
            try:
                return backend.submit(batch)
            except PeerGone:
                backend.connect(self._peer(backend))
                return backend.submit(batch)
        except RegionError:  # found before a byte was posted
            raise
        except BaseException:  # of either post: what it has begun may still land
            self._fence(backend)
            raise

    def quieten(self, backend: Backend, handle: PullHandle) -> None:
        """Return only when nothing of the pull can land any more: settle, else fence the peer."""
        give_up = time.monotonic() + self._settle_timeout_s
        try:
            while backend.settle(handle) is Settled.NOT_QUIET:
                if time.monotonic() >= give_up:
                    self._fence(backend)
                    return
                time.sleep(SETTLE_SLEEP_S)
        except BaseException:  # an answer that does not come is not a quiet one
            log.exception("backend %s cannot settle a pull from %s", backend.name, self.rank.worker_id)
            self._fence(backend)

    def _fence(self, backend: Backend) -> None:
        """Break the link. Where even that fails, the pages stay in use until it does not."""
        while True:
            try:
                broken = backend.fence(self._peer(backend))
            except BaseException:
                log.exception("backend %s cannot fence %s; trying again", backend.name, self.rank.worker_id)
                time.sleep(FENCE_RETRY_S)
                continue
            log.warning("fenced %s to make a pull quiet", ", ".join(broken))
            self.choice = None
            return

    def _peer(self, backend: Backend) -> Peer:
        return Peer(self.rank.worker_id, self.rank.incarnation, self.rank.transports[backend.name])


@dataclass(frozen=True, slots=True)
class JobWire:
    """The wire as one pull uses it, and the clock on it.

    `stop` is set when the pull must end; `failing` is told when it has gone wrong but bytes may still land; `cause`
    turns what a backend raises into what the request is told.
    """

    wire: RankWire
    backend: Backend
    stop: threading.Event
    failing: Callable[[Failure], None]
    cause: Callable[[BaseException], Failure]
    timings: PullTimings

    def start(self, batch: PullBatch) -> PullHandle:
        began = time.perf_counter()
        handle = self.wire.submit(self.backend, batch)
        posting_s = handle.timings.post_s
        self.timings.post_s += posting_s
        self.timings.prep_s += time.perf_counter() - began - posting_s
        self.timings.num_posted += 1
        return handle

    def look(self, handle: PullHandle) -> PullStatus | Failure:
        """Advance a posted pull: PENDING, DONE, or what went wrong. Unless PENDING it is quiet then, also when this
        raises."""
        with self._on_the_clock(handle):
            return self._look(handle)

    def nap(self, nap_s: float) -> None:
        if not self.backend.capabilities.works_in_poll:
            time.sleep(nap_s)

    def finish(self, handle: PullHandle) -> Failure | None:
        """Wait for the end of a posted pull; it is quiet then, also when this raises."""
        with self._on_the_clock(handle):
            while (status := self._look(handle)) is PullStatus.PENDING:
                self.nap(max(IDLE_SLEEP_S, handle.nap_s))
        return status if isinstance(status, Failure) else None

    def drop(self, handle: PullHandle) -> None:
        self.wire.quieten(self.backend, handle)

    def _look(self, handle: PullHandle) -> PullStatus | Failure:
        backend, worker_id = self.backend, self.wire.rank.worker_id
        try:
            status = backend.poll(handle)
        except BaseException as error:  # whatever it is, it promises nothing about what may still land
            try:
                self.failing(self.cause(error))
            finally:
                self.drop(handle)
            raise
        if status is PullStatus.DONE or (status is PullStatus.PENDING and not self.stop.is_set()):
            return status
        if status is PullStatus.FAILED:
            failure = self.cause(handle.error or BackendError(f"backend {backend.name} gives no reason"))
            self.failing(failure)
        else:
            failure = Failure(FailureReason.ABORTED, "stopped by the request", worker_id)
        self.drop(handle)
        return failure

    @contextmanager
    def _on_the_clock(self, handle: PullHandle) -> Iterator[None]:
        theirs, began = handle.timings, time.perf_counter()
        prep_s, post_s = theirs.prep_s, theirs.post_s
        try:
            yield
        finally:
            prep_s, post_s = theirs.prep_s - prep_s, theirs.post_s - post_s
            self.timings.prep_s += prep_s
            self.timings.post_s += post_s
            self.timings.wire_s += time.perf_counter() - began - prep_s - post_s
