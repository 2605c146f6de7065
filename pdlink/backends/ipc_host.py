"""Owns pulls from a peer's shared memory: its segments as mapped here, and the portions that `poll` moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from pdlink.backends.host_copy import copy_rows
from pdlink.backends.ipc_endpoint import SharedSegment
from pdlink.backends.mapped import Mapped, MappedSource
from pdlink.backends.shm import AttachedSegment, attach
from pdlink.transfer.descriptors import Descriptors, GroupMove, Int64Array, PullBatch

BYTES_PER_POLL = 64 << 20
"""Some milliseconds, which a pull that is stopped may still take. A poll itself costs 0.1 ms, because the copies before
it have driven its code out of the caches."""
ROWS_PER_PIECE = 4096

Portion = tuple[list[int], list[int], list[int]]
"""Destinations, sources and sizes of ranges that have at most `BYTES_PER_POLL` bytes together."""


@dataclass(frozen=True, slots=True, eq=False)
class HostMappings:
    """A peer's segments, mapped for reading as long as this object lives."""

    worker_id: str
    source: MappedSource
    segments: tuple[AttachedSegment, ...]

    @classmethod
    def of(cls, worker_id: str, shared: Iterable[SharedSegment]) -> HostMappings:
        """Raises `RegionError` or `PeerGone`, with nothing left mapped."""
        segments: list[AttachedSegment] = []
        rows = []
        try:
            for one in shared:
                segments.append(attach(one.name, one.nbytes))
                rows.append((one.start, one.start + one.nbytes, segments[-1].address))
        except BaseException:
            for segment in segments:
                segment.close()
            raise
        source = MappedSource(worker_id, f"segment of {worker_id}", Mapped.of(rows))
        return cls(worker_id, source, tuple(segments))

    def portions(self, moves: Iterable[GroupMove], own: Int64Array) -> Iterator[Portion]:
        """What the moves copy into `own`, the spans that may be written. Raises `RegionError` at once."""
        here = tuple(self.source.localised(move, own) for move in moves)
        return _portions(PullBatch(self.worker_id, here).expand(ROWS_PER_PIECE))


def copy_some(portions: Iterator[Portion]) -> int:
    """Move one portion; returns its bytes, 0 when there is none. Every range was checked before."""
    for destinations, sources, sizes in portions:
        copy_rows(destinations, sources, sizes)
        return sum(sizes)
    return 0


def _portions(pieces: Iterator[Descriptors]) -> Iterator[Portion]:
    for piece in pieces:
        if int(piece.nbytes.sum()) <= BYTES_PER_POLL:
            yield piece.destination.tolist(), piece.source.tolist(), piece.nbytes.tolist()
            continue
        rows = _cut(piece)
        ends = np.cumsum(rows.nbytes)
        first = 0
        while first < len(rows):
            before = int(ends[first - 1]) if first else 0
            stop = max(first + 1, int(np.searchsorted(ends, before + BYTES_PER_POLL, side="right")))
            some = slice(first, stop)
            yield rows.destination[some].tolist(), rows.source[some].tolist(), rows.nbytes[some].tolist()
            first = stop


def _cut(rows: Descriptors) -> Descriptors:
    """The same ranges, none longer than `BYTES_PER_POLL`."""
    if not len(rows) or int(rows.nbytes.max()) <= BYTES_PER_POLL:
        return rows
    parts = -(-rows.nbytes // BYTES_PER_POLL)
    number = np.arange(int(parts.sum()), dtype=np.int64) - np.repeat(np.cumsum(parts) - parts, parts)
    offset = number * BYTES_PER_POLL
    left = np.repeat(rows.nbytes, parts) - offset
    return Descriptors(
        np.repeat(rows.source, parts) + offset,
        np.repeat(rows.destination, parts) + offset,
        np.minimum(left, BYTES_PER_POLL),
    )
