"""Owns where memory of another process lies here, and moves out of it as they are seen from here: checked, once for
layers that come again. It maps nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pdlink.backends.ranges import (
    MAX_KNOWN,
    check_destinations,
    check_sources,
    extent,
    first_outside,
    pages_inside,
)
from pdlink.errors import RegionError
from pdlink.transfer.descriptors import GroupMove, Int64Array, LayerTable
from pdlink.transfer.kept import Kept


@dataclass(frozen=True, slots=True, eq=False)
class Mapped:
    """Memory of another process as it is mapped here: int64 columns, in order of `start`.

    Addresses [start[i], stop[i]) of the owner lie at `here[i]` and up.
    """

    start: Int64Array
    stop: Int64Array
    here: Int64Array

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, int]]) -> Mapped:
        """From (start, stop, here) of each."""
        return cls(*np.array(sorted(rows), dtype=np.int64).reshape(-1, 3).T)

    @property
    def spans(self) -> Int64Array:
        """int64 [n, 2] of the owner's (first, past-the-end) addresses."""
        return np.stack([self.start, self.stop], axis=1)

    def rebase(self, layers: LayerTable) -> LayerTable:
        """The layers where they lie here. Each base must lie in mapped memory."""
        which = np.searchsorted(self.start, layers.source_base, side="right") - 1
        return layers.rebased(layers.source_base - self.start[which] + self.here[which])


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """Layers that have been pulled: as they are `here`, and how many pages of every one, from 0, lie in memory that may
    be read, and in memory that may be written, which is `own`."""

    own: Int64Array
    here: LayerTable
    num_source: int
    num_destination: int


class MappedSource:
    """The memory of one peer as it is `mapped`; of that, what lies in `registered` may be read (None: all of it).

    `what` names it in refusals.
    """

    def __init__(self, worker_id: str, what: str, mapped: Mapped, registered: Int64Array | None = None) -> None:
        self.mapped = mapped
        self._worker_id = worker_id
        self._what = what
        self._registered = registered
        self._known: Kept[LayerTable, _Known] = Kept(MAX_KNOWN)

    def localised(self, move: GroupMove, own: Int64Array) -> GroupMove:
        """The move as it is here. `own` are the spans that may be written; while they are the same object, layers that
        come again are looked at once. Raises `RegionError` for a page that may not be read or written.
        """
        known = self._known.get(move.layers)
        if known is None or known.own is not own:
            known = self._known.put(move.layers, self._look_at(move.layers, own))
        if move.runs.lie_within(known.num_source, known.num_destination):
            return GroupMove(move.group, move.runs, known.here)
        check_destinations(move, own)
        if self._registered is not None:
            check_sources(move, self._registered, self._worker_id)
        self._check_mapped(move)
        return GroupMove(move.group, move.runs, self.mapped.rebase(move.layers))

    def _look_at(self, layers: LayerTable, own: Int64Array) -> _Known:
        places = (layers.source_base, layers.source_stride, layers.page_bytes)
        of = pages_inside(*places, self.mapped.spans)
        if self._registered is not None:
            of = min(of, pages_inside(*places, self._registered))
        into = pages_inside(layers.destination_base, layers.destination_stride, layers.page_bytes, own)
        return _Known(own, self.mapped.rebase(layers) if of[1] else layers, of[1], into[1])

    def _check_mapped(self, move: GroupMove) -> None:
        layers, runs = move.layers, move.runs
        first, end = extent(layers.source_base, layers.source_stride, layers.page_bytes, runs.source, runs.count)
        row = first_outside(layers.source_base, first, end, self.mapped.spans)
        if row is not None:
            raise RegionError(f"addresses {int(first[row]):#x}..{int(end[row]):#x} are in no {self._what}")
