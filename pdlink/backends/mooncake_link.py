"""Owns the reads from one mooncake peer: an engine of their own, and the window of reads in flight. It plans nothing.

Every peer has its own engine, so that breaking the link to one breaks no other, nor what this process serves itself.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from time import perf_counter

from pdlink.address import parse_address
from pdlink.backends.base import Peer, PullHandle, PullStatus
from pdlink.backends.kept_plans import KeptPlans
from pdlink.backends.mooncake_engine import DONE, LOG_HINT, NVLINK, PENDING, Engine, Span
from pdlink.backends.ranges import RangeCheck
from pdlink.errors import BackendError, PeerGone
from pdlink.threads import Death, OnDeath, SupervisedThread
from pdlink.transfer.descriptors import PullBatch


@dataclass(frozen=True, slots=True)
class Window:
    """How reads are posted, and how many are in flight.

    Ranges longer than `read_bytes` are cut (0: none), so that what has to be waited for when a pull is stopped stays
    little. `batch_reads` go in one batch. At most `batches` and `nbytes` bytes of a pull are in flight, and
    `link_batches` of all pulls from one peer; above that each pull keeps one going. `longest_nap_s` is how long those
    who poll are told to wait at most before they look again.
    """

    read_bytes: int
    batch_reads: int
    batches: int
    nbytes: int
    link_batches: int
    longest_nap_s: float


# Fewer reads starve the library's connections, and so do a few long ones; it queues 1,024 for a peer.
NETWORK = Window(2 << 20, 1, 256, 64 << 20, 768, 1e-3)
# Four thousand reads are some ten milliseconds, and a few gigabytes.
DEVICES = Window(0, 1024, 4, 4 << 30, 64, 0.0)


def window_of(protocol: str) -> Window:
    return DEVICES if protocol == NVLINK else NETWORK


Batch = tuple[list[int], list[int], list[int]]
"""Addresses read from, addresses written to, bytes of each."""

FIRST_NAP_S, LONGEST_NAP_S = 20e-6, 1e-3
NAP_SHARE = 64
"""Who waits for a pull looks again after this part of what it has taken. Longer naps leave the cores to the library's
threads, and what the last one adds is to stay little beside the rest."""
ROWS_PER_PIECE = 4096
CLOSE_TIMEOUT_S = 2.0
LOOK_TIMEOUT_S = 0.2


class MooncakePull(PullHandle):
    """A pull. It is quiet when `posted` is empty, or when its link's engine has ended."""

    def __init__(self, batch: PullBatch, link: Link, batches: Iterator[Batch]) -> None:
        super().__init__(batch)
        self.link = link
        self.batches = batches
        self.next: Batch | None = next(self.batches, None)
        self.posted: deque[tuple[int, int]] = deque()
        """(id, nbytes) of the batches in flight."""
        self.nbytes = 0
        self.status = PullStatus.PENDING
        self.began = perf_counter()

    def fail(self, error: Exception) -> None:
        """The first failure stays. Nothing more is posted."""
        if self.status is PullStatus.PENDING:
            self.status, self.error = PullStatus.FAILED, error
        self.batches, self.next = iter(()), None


class Link:
    """A peer as connected. Any thread may call; calls of several wait for each other."""

    def __init__(self, peer: Peer, session: str, engine: Engine, window: Window) -> None:
        self.peer = peer
        self.window = window
        self.plans: KeptPlans[Batch] = KeptPlans()
        self.ranges = RangeCheck()
        self.is_open = True
        """Whether the engine still runs. Once it does not, every pull of the link is quiet."""
        self._session = session
        self._engine = engine
        self._lock = threading.Lock()
        self._num_posted = 0
        self._retired = False

    def offer(self, spans: Collection[Span]) -> None:
        """Tell the engine which local memory there is. Raises `RegionError`."""
        with self._lock:
            if self.is_open:
                self._engine.offer_destinations(spans)

    def advance(self, pull: MooncakePull) -> None:
        """Take in what has landed, and post what there is room for."""
        with self._lock:
            if not self.is_open:
                pull.fail(PeerGone(f"the link to {self.peer.worker_id} was broken"))
                pull.posted.clear()
                return
            self._reap(pull)
            if pull.status is PullStatus.PENDING:
                began = perf_counter()
                self._post(pull)
                pull.timings.post_s += perf_counter() - began
            if not pull.posted and pull.status is PullStatus.PENDING:
                pull.status = PullStatus.DONE
            pull.nap_s = min((perf_counter() - pull.began) / NAP_SHARE, self.window.longest_nap_s)
            self._close_if_idle()

    def drain(self, pull: MooncakePull) -> bool:
        """Post nothing more of `pull`; returns whether nothing of it is in flight."""
        with self._lock:
            if self.is_open:
                try:
                    still = deque(one for one in pull.posted if self._engine.check(one[0]) == PENDING)
                except BackendError:  # nobody may ask any more: this process is ending
                    return False
                self._num_posted -= len(pull.posted) - len(still)
                pull.posted = still
                self._close_if_idle()
            else:
                pull.posted.clear()
            return not pull.posted

    def retire(self) -> None:
        """End the engine as soon as nothing is in flight on it."""
        with self._lock:
            self._retired = True
            self._close_if_idle()

    def close(self) -> None:
        """End the engine: nothing of any pull lands after that. Raises `BackendError` while a call is stuck in it."""
        if not self._lock.acquire(timeout=CLOSE_TIMEOUT_S):
            raise BackendError(
                f"a call of mooncake for {self.peer.worker_id} has not returned for {CLOSE_TIMEOUT_S:g} s"
            )
        try:
            self._end()
        finally:
            self._lock.release()

    def _reap(self, pull: MooncakePull) -> None:
        """Reads end about in order, so a look at the oldest is enough."""
        while pull.posted:
            posted, nbytes = pull.posted[0]
            state = self._engine.check(posted)
            if state == PENDING:
                break
            pull.posted.popleft()
            pull.nbytes -= nbytes
            self._num_posted -= 1
            if state != DONE:
                pull.fail(self._explain())

    def _post(self, pull: MooncakePull) -> None:
        while (batch := pull.next) is not None and (not pull.posted or self._has_room(pull, sum(batch[2]))):
            sources, destinations, sizes = batch
            try:
                posted = self._engine.read(self._session, destinations, sources, sizes)
            except BackendError as error:
                pull.fail(error)
                return
            nbytes = sum(sizes)
            pull.posted.append((posted, nbytes))
            pull.nbytes += nbytes
            self._num_posted += 1
            pull.next = next(pull.batches, None)

    def _has_room(self, pull: MooncakePull, nbytes: int) -> bool:
        window = self.window
        fits = len(pull.posted) < window.batches and pull.nbytes + nbytes <= window.nbytes
        return fits and self._num_posted < window.link_batches

    def _explain(self) -> BackendError:
        """Why a read failed: the library does not say, so its port is asked whether anybody is there."""
        address = parse_address(self._session)
        worker_id = self.peer.worker_id
        try:
            with socket.create_connection((address.host, address.port), timeout=LOOK_TIMEOUT_S):
                pass
        except OSError as error:
            return PeerGone(
                f"{worker_id} is gone: a read over mooncake failed, and {address} does not answer ({error})"
            )
        return BackendError(
            f"a read from {worker_id} over mooncake failed, though {address} answers; it may have taken its memory "
            f"back; {LOG_HINT}"
        )

    def _close_if_idle(self) -> None:
        if self._retired and not self._num_posted:
            self._end()

    def _end(self) -> None:
        if self.is_open:
            self._engine.close()
            self.is_open = False


class Opening:
    """The first read from a peer, on a thread of its own, because the library may block in it for a minute."""

    def __init__(
        self, peer: Peer, session: str, first_address: int, engine: Engine, window: Window, on_death: OnDeath
    ) -> None:
        self._peer = peer
        self._session = session
        self._engine = engine
        self._window = window
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._abandoned = False
        self._error: BackendError | None = None
        self._thread = SupervisedThread(
            lambda: self._run(first_address),
            f"pdlink-mooncake-{peer.worker_id}",
            "backend mooncake",
            on_death=lambda death: self._die(death, on_death),
        )
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def link(self, timeout_s: float) -> Link:
        """The link, once the peer has answered. Raises `PeerGone`; the engine is then ended, now or when it lets go."""
        self._over.wait(timeout_s)
        with self._lock:
            if not self._over.is_set():
                self._abandoned = True
                raise PeerGone(f"{self._peer.worker_id} at {self._session} did not answer mooncake for {timeout_s:g} s")
        if self._error:
            self._engine.close()
            raise self._error
        return Link(self._peer, self._session, self._engine, self._window)

    def _run(self, first_address: int) -> None:
        error: BackendError | None = None
        try:
            posted = self._engine.read_byte(self._session, first_address)
            nap_s = FIRST_NAP_S
            while (state := self._engine.check(posted)) == PENDING and not self._abandoned:
                time.sleep(nap_s)
                nap_s = min(2 * nap_s, LONGEST_NAP_S)
            if state != DONE:
                error = PeerGone(f"{self._peer.worker_id} at {self._session} refused a first read; {LOG_HINT}")
        except BackendError as caught:
            error = PeerGone(f"{self._peer.worker_id} at {self._session} does not answer mooncake: {caught}")
        self._end(error)

    def _die(self, death: Death, told: OnDeath) -> None:
        try:
            self._end(BackendError(death.text))
        finally:
            told(death)

    def _end(self, error: BackendError | None) -> None:
        with self._lock:
            self._error = error
            self._over.set()
            abandoned = self._abandoned
        if abandoned:
            self._engine.close()


def batches_of(batch: PullBatch, window: Window) -> Iterator[Batch]:
    """Everything that `batch` moves, as the window says it is posted."""
    for piece in batch.expand(window.batch_reads if window.batch_reads > 1 else ROWS_PER_PIECE):
        columns = (piece.source.tolist(), piece.destination.tolist(), piece.nbytes.tolist())
        if window.batch_reads > 1:
            yield columns
            continue
        for source, destination, nbytes in zip(*columns, strict=True):
            for start in range(0, nbytes, window.read_bytes):
                yield [source + start], [destination + start], [min(window.read_bytes, nbytes - start)]
