"""Owns what a backend is asked to move: page runs, layer tables and pull batches. It neither plans nor moves.

A batch is factored: page pairs are held once and layers are rows of offsets, so its size is pages + layers and not
pages x layers. `expand` builds plain (source, destination, nbytes) rows for a backend that needs them, a bounded
number at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64Array: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PageRuns:
    """Page pairs as runs that are consecutive on both sides: three int64 arrays of one length.

    Run i copies pages `source[i] + k` to `destination[i] + k` for k in [0, count[i]).
    """

    source: Int64Array
    destination: Int64Array
    count: Int64Array

    @property
    def num_runs(self) -> int:
        return len(self.count)

    @cached_property
    def num_pages(self) -> int:
        return int(self.count.sum())

    @cached_property
    def is_scattered(self) -> bool:
        """Whether every page is a run of its own."""
        return self.num_pages == self.num_runs and bool(np.all(self.count == 1))

    @cached_property
    def _ends(self) -> tuple[int, int, int]:
        """The least page of either side, and ends that no page of the source and of the destination reaches. Python's
        numbers, which do not wrap."""
        if self.num_runs == 1:  # what is asked most, and without a look at whole arrays
            source, destination, count = int(self.source[0]), int(self.destination[0]), int(self.count[0])
            return min(source, destination), source + count, destination + count
        least, longest = min(int(self.source.min()), int(self.destination.min())), int(self.count.max())
        return least, int(self.source.max()) + longest, int(self.destination.max()) + longest

    def lie_within(self, num_source: int, num_destination: int) -> bool:
        """Whether every page is surely one of so many, from 0 on, on its side. Quick, and not sure of a run that ends
        at the last page and is shorter than others."""
        if not self.num_runs:
            return True
        least, source, destination = self._ends
        return least >= 0 and source <= num_source and destination <= num_destination

    def destination_pages(self) -> Int64Array:
        """int64 [num_pages], in run order. Not to be written to."""
        return self.destination if self.is_scattered else _spread(self.destination, self.count)

    def source_pages(self) -> Int64Array:
        """int64 [num_pages], in run order. Not to be written to."""
        return self.source if self.is_scattered else _spread(self.source, self.count)

    def split(self) -> PageRuns:
        """The same pairs as runs of one page each."""
        return PageRuns(self.source_pages(), self.destination_pages(), np.ones(self.num_pages, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class LayerTable:
    """Where pages lie, per (component, layer): int64 columns of one length. Bases are addresses, strides bytes.

    `rows` are the cell rows of the planner (component and layer), used by coverage and by the check. Requests share
    tables, which thus remember what they come to.
    """

    rows: Int64Array
    source_base: Int64Array
    source_stride: Int64Array
    destination_base: Int64Array
    destination_stride: Int64Array
    page_bytes: Int64Array

    @property
    def num_layers(self) -> int:
        return len(self.rows)

    @cached_property
    def dense(self) -> npt.NDArray[np.bool_]:
        """bool [num_layers]: whether a run of pages is one range on both sides."""
        dense: npt.NDArray[np.bool_] = (self.source_stride == self.page_bytes) & (
            self.destination_stride == self.page_bytes
        )
        return dense

    @cached_property
    def num_dense(self) -> int:
        return int(self.dense.sum())

    @cached_property
    def row_bytes(self) -> int:
        """Of one page in every layer."""
        return int(self.page_bytes.sum())

    def take(self, positions: Int64Array) -> LayerTable:
        """The table's rows at `positions`, in that order."""
        return LayerTable(*(getattr(self, one.name)[positions] for one in fields(self)))

    def slice(self, first: int, stop: int) -> LayerTable:
        """Its rows [first, stop), as far as there are any."""
        if first <= 0 and stop >= self.num_layers:
            return self
        return self.take(np.arange(first, min(stop, self.num_layers), dtype=np.int64))

    def of_kind(self, dense: bool) -> LayerTable:
        """Its rows that are dense, or those that are not."""
        if self.num_dense in (0, self.num_layers):
            return self if (self.num_dense > 0) == dense else self.take(np.zeros(0, dtype=np.int64))
        return self.take(np.flatnonzero(self.dense == dense))

    def reversed(self) -> LayerTable:
        """The way back: from the destinations to the sources."""
        ways = (self.destination_base, self.destination_stride, self.source_base, self.source_stride)
        return LayerTable(self.rows, *ways, self.page_bytes)

    def rebased(self, source_base: Int64Array) -> LayerTable:
        """The same table with other source addresses, for a backend that maps the owner's memory elsewhere."""
        return replace(self, source_base=source_base)


@dataclass(frozen=True, eq=False)
class GroupMove:
    """One page group's share of a batch: the same page pairs in every layer of the table."""

    group: str
    runs: PageRuns
    layers: LayerTable

    @cached_property
    def nbytes(self) -> int:
        return self.runs.num_pages * self.layers.row_bytes

    @cached_property
    def num_descriptors(self) -> int:
        """Rows that `expand` would build."""
        num_dense = self.layers.num_dense
        return num_dense * self.runs.num_runs + (self.layers.num_layers - num_dense) * self.runs.num_pages


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """Plain moves: int64 arrays of one length; `nbytes[i]` bytes from `source[i]` to `destination[i]`."""

    source: Int64Array
    destination: Int64Array
    nbytes: Int64Array

    def __len__(self) -> int:
        return len(self.nbytes)


@dataclass(frozen=True, eq=False)
class PullBatch:
    """Everything to pull from one owner at once."""

    worker_id: str
    moves: tuple[GroupMove, ...]

    @cached_property
    def nbytes(self) -> int:
        return sum(move.nbytes for move in self.moves)

    @cached_property
    def num_descriptors(self) -> int:
        return sum(move.num_descriptors for move in self.moves)

    def expand(self, max_rows: int = 1 << 16) -> Iterator[Descriptors]:
        """Plain rows, layer by layer, in pieces of at most `max_rows`."""
        for move in self.moves:
            yield from _expand(move, max_rows)


def pair_pages(source_pages: Int64Array, destination_pages: Int64Array) -> PageRuns:
    """Merge page pairs into runs. Both are int64 [n]; the order of pairs does not matter.

    Pairs are sorted by source page first, because an allocator that hands pages out in order gives the same runs on
    both sides whatever the order in which they were listed.
    """
    if len(source_pages) < 2:
        return PageRuns(source_pages.copy(), destination_pages.copy(), np.ones(len(source_pages), dtype=np.int64))
    order = np.argsort(source_pages, kind="stable")
    source, destination = source_pages[order], destination_pages[order]
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(destination) != 1)) + 1
    starts = np.concatenate([np.zeros(1, dtype=np.int64), breaks])
    counts = np.diff(np.concatenate([starts, np.array([len(source)], dtype=np.int64)]))
    return PageRuns(source[starts], destination[starts], counts)


def single_pages(source_pages: Int64Array, destination_pages: Int64Array) -> PageRuns:
    """Page pairs as runs of one page each, in their order: for copiers that gain nothing by longer ones. Both are int64
    [n], and are kept."""
    return PageRuns(source_pages, destination_pages, np.ones(len(source_pages), dtype=np.int64))


def _spread(first: Int64Array, count: Int64Array) -> Int64Array:
    """first[i], first[i] + 1, ... count[i] of them, for each i."""
    before = np.repeat(np.cumsum(count) - count, count)
    return np.repeat(first, count) + np.arange(len(before), dtype=np.int64) - before


def _expand(move: GroupMove, max_rows: int) -> Iterator[Descriptors]:
    num_dense = move.layers.num_dense
    for dense in (True, False):
        if (num_dense if dense else move.layers.num_layers - num_dense) == 0:
            continue
        chosen = move.layers.of_kind(dense)
        pages = move.runs if dense else move.runs.split()
        for start in range(0, pages.num_runs, max_rows):
            piece = slice(start, start + max_rows)
            source, destination, count = pages.source[piece], pages.destination[piece], pages.count[piece]
            if not len(count):
                continue
            num_layers = max(1, max_rows // len(count))
            for first in range(0, chosen.num_layers, num_layers):
                part = chosen.slice(first, first + num_layers)
                yield Descriptors(
                    (part.source_base[:, None] + source[None, :] * part.source_stride[:, None]).reshape(-1),
                    (part.destination_base[:, None] + destination[None, :] * part.destination_stride[:, None]).reshape(
                        -1
                    ),
                    (part.page_bytes[:, None] * count[None, :]).reshape(-1),
                )
