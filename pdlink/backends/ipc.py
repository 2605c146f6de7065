"""Owns the same-host backend: pulls straight from the owner's shared memory, page by page, without a staging copy.

It serves host memory that `pdlink.memory.allocate` (or any `shm.Segment`) holds. Bytes move inside `poll`, on the
caller's thread and at most `BYTES_PER_POLL` at a time, so a pull is quiet whenever `poll` is not running.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pdlink.backends.base import Backend, Capabilities, Peer, PullHandle, PullStatus, Settled
from pdlink.backends.ranges import as_spans, check_destinations, extent, first_outside
from pdlink.backends.shm import SHM_DIR, AttachedSegment, attach, locate
from pdlink.errors import BackendError, BackendUnavailable, PeerGone, RegionError
from pdlink.layout.regions import MAX_ADDRESS, MemoryKind, Region
from pdlink.transfer.descriptors import Descriptors, GroupMove, Int64Array, PullBatch

BYTES_PER_POLL = 16 << 20
ROWS_PER_PIECE = 4096


@dataclass(frozen=True, slots=True)
class _Mapped:
    """One of a peer's segments: where it lies there, and where it is mapped here."""

    start: int
    stop: int
    segment: AttachedSegment


@dataclass(slots=True, eq=False)
class _Link:
    """A peer as connected. No pull over it moves a byte once it is `broken`: by `fence`, by `close`, or because another
    incarnation took its place."""

    incarnation: int
    mapped: tuple[_Mapped, ...]
    broken: bool = False


class _IpcPull(PullHandle):
    def __init__(self, batch: PullBatch, rows: Iterator[tuple[int, int, int]], link: _Link) -> None:
        super().__init__(batch)
        self.rows = rows
        self.link: _Link | None = link
        """Held so that the mappings outlive a `disconnect` in the middle of the pull."""
        self.status = PullStatus.PENDING

    def end(self, status: PullStatus, error: Exception | None = None) -> None:
        self.status, self.error = status, error
        self.rows, self.link = iter(()), None


class IpcBackend(Backend):
    """See `Backend`. Registering is free: a region is only remembered, to check destinations and to tell peers."""

    name = "ipc"
    capabilities = Capabilities(frozenset({MemoryKind.HOST}), same_host_only=True, works_in_poll=True, gathers=True)

    def __init__(self) -> None:
        self._host = _host_identity()
        self._regions: dict[tuple[int, int], int] = {}
        self._spans: Int64Array | None = None
        """The regions in order, made when a pull needs them."""
        self._peers: dict[str, _Link] = {}
        self._lock = threading.Lock()

    def register(self, region: Region) -> None:
        if region.memory is not MemoryKind.HOST:
            raise RegionError(
                f"backend ipc serves host memory; {region.component!r} layer {region.layer} is on {region.memory}"
            )
        with self._lock:
            span = (region.base_address, region.end_address)
            self._regions[span] = self._regions.get(span, 0) + 1
            self._spans = None

    def deregister(self, region: Region) -> None:
        with self._lock:
            span = (region.base_address, region.end_address)
            self._regions[span] = self._regions.get(span, 0) - 1
            if self._regions[span] <= 0:
                del self._regions[span]
                self._spans = None

    def endpoint(self) -> bytes:
        """Host identity and the segments of all registered regions, as JSON.

        Raises `RegionError` when a region is not in shared memory.
        """
        segments: dict[str, tuple[int, int]] = {}
        with self._lock:
            spans = list(self._regions)
        for start, stop in spans:
            place = locate(start, stop - start)
            if place is None:
                raise RegionError(
                    f"memory {start:#x}..{stop:#x} is private to this process, so no peer can read it over ipc; "
                    "allocate the pool with pdlink.memory.allocate"
                )
            segments[place.name] = (start - place.offset, place.nbytes)
        listed = [[name, base, nbytes] for name, (base, nbytes) in segments.items()]
        return json.dumps({"host": self._host, "segments": listed}, separators=(",", ":")).encode()

    def connect(self, peer: Peer) -> None:
        with self._lock:
            known = self._peers.get(peer.worker_id)
        if known and known.incarnation == peer.incarnation:
            return
        host, listed = _parse_endpoint(peer)
        if host != self._host:
            raise BackendUnavailable(f"{peer.worker_id} runs on another host or with another /dev/shm ({host})")
        mapped: list[_Mapped] = []
        try:
            for name, base, nbytes in listed:
                mapped.append(_Mapped(base, base + nbytes, attach(name, nbytes)))
        except BaseException:
            for one in mapped:
                one.segment.close()
            raise
        link = _Link(peer.incarnation, tuple(sorted(mapped, key=lambda one: one.start)))
        with self._lock:
            replaced = self._peers.get(peer.worker_id)
            self._peers[peer.worker_id] = link
        if replaced and replaced.incarnation != peer.incarnation:
            replaced.broken = True

    def disconnect(self, peer: Peer) -> None:
        with self._lock:
            known = self._peers.get(peer.worker_id)
            if known and known.incarnation == peer.incarnation:
                del self._peers[peer.worker_id]

    def submit(self, batch: PullBatch) -> PullHandle:
        with self._lock:
            link = self._peers.get(batch.worker_id)
            if self._spans is None:
                self._spans = as_spans(self._regions)
            spans = self._spans
        if link is None:
            raise PeerGone(f"{batch.worker_id} is not connected over ipc")
        for move in batch.moves:
            check_destinations(move, spans)
        moves = tuple(_localised(move, link.mapped, batch.worker_id) for move in batch.moves)
        return _IpcPull(batch, _rows(PullBatch(batch.worker_id, moves).expand(ROWS_PER_PIECE)), link)

    def poll(self, handle: PullHandle) -> PullStatus:
        assert isinstance(handle, _IpcPull)
        if handle.link and handle.link.broken:
            handle.end(PullStatus.FAILED, PeerGone(f"the link to {handle.batch.worker_id} was broken"))
        if handle.status is PullStatus.PENDING and _copy(handle.rows):
            handle.end(PullStatus.DONE)
        return handle.status

    def settle(self, handle: PullHandle) -> Settled:
        assert isinstance(handle, _IpcPull)
        if handle.status is PullStatus.PENDING:
            handle.end(PullStatus.FAILED, BackendError("the pull was stopped before all of it had landed"))
        return Settled.QUIET

    def fence(self, peer: Peer) -> tuple[str, ...]:
        with self._lock:
            link = self._peers.get(peer.worker_id)
            if link and link.incarnation == peer.incarnation:
                link.broken = True
                del self._peers[peer.worker_id]
        return (peer.worker_id,)

    def close(self) -> None:
        with self._lock:
            for link in self._peers.values():
                link.broken = True
            self._peers.clear()
            self._regions.clear()
            self._spans = None


def _host_identity() -> str:
    """Equal for two processes exactly when they see the same /dev/shm of the same boot."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        shm = os.stat(SHM_DIR)
    except OSError as error:
        raise BackendUnavailable(f"backend ipc needs {SHM_DIR} and /proc: {error}") from error
    return f"{boot}/{shm.st_dev}:{shm.st_ino}"


def _parse_endpoint(peer: Peer) -> tuple[str, list[tuple[str, int, int]]]:
    try:
        blob = json.loads(peer.endpoint)
        listed = [(str(name), int(base), int(nbytes)) for name, base, nbytes in blob["segments"]]
        host = str(blob["host"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise BackendUnavailable(f"{peer.worker_id} offers an ipc endpoint that cannot be read: {error}") from error
    for name, base, nbytes in listed:
        if base < 1 or nbytes < 1 or base + nbytes > MAX_ADDRESS:
            raise BackendUnavailable(f"{peer.worker_id} offers segment {name} at {base:#x} of {nbytes} bytes over ipc")
    return host, listed


def _localised(move: GroupMove, mapped: tuple[_Mapped, ...], worker_id: str) -> GroupMove:
    """The same move with the owner's addresses replaced by where its segments are mapped here."""
    layers = move.layers
    starts = np.array([one.start for one in mapped], dtype=np.int64)
    stops = np.array([one.stop for one in mapped], dtype=np.int64)
    here = np.array([one.segment.address for one in mapped], dtype=np.int64)
    first, end = extent(layers.source_base, layers.source_stride, layers.page_bytes, move.runs.source, move.runs.count)
    row = first_outside(layers.source_base, first, end, np.stack([starts, stops], axis=1))
    if row is not None:
        raise RegionError(f"addresses {int(first[row]):#x}..{int(end[row]):#x} are in no segment of {worker_id}")
    which = np.searchsorted(starts, layers.source_base, side="right") - 1
    return GroupMove(move.group, move.runs, layers.rebased(layers.source_base - starts[which] + here[which]))


def _rows(pieces: Iterator[Descriptors]) -> Iterator[tuple[int, int, int]]:
    """(source, destination, nbytes) one by one, none longer than `BYTES_PER_POLL`."""
    for piece in pieces:
        for row in zip(piece.source.tolist(), piece.destination.tolist(), piece.nbytes.tolist(), strict=True):
            source, destination, nbytes = row
            while nbytes > BYTES_PER_POLL:
                yield source, destination, BYTES_PER_POLL
                source, destination, nbytes = (
                    source + BYTES_PER_POLL,
                    destination + BYTES_PER_POLL,
                    nbytes - BYTES_PER_POLL,
                )
            yield source, destination, nbytes


def _copy(rows: Iterator[tuple[int, int, int]]) -> bool:
    """Move rows until there are none, or until `BYTES_PER_POLL` bytes have moved; returns whether there are none.

    Every range was checked by `submit`.
    """
    memmove, budget = ctypes.memmove, BYTES_PER_POLL
    for source, destination, nbytes in rows:
        memmove(destination, source, nbytes)
        budget -= nbytes
        if budget <= 0:
            return False
    return True
