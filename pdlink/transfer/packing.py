"""Owns how the pages of a pull lie inside staging slots: the cut into pieces, and the copies in and out. No I/O.

A piece is a rectangle of rows x page positions. In a slot its rows follow each other in their order, and within a row
its pages, so that both sides know where everything lies from the rows, their page bytes and the number of pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pdlink.errors import PlanError
from pdlink.layout.parts import Part
from pdlink.layout.staging import COMPONENT, StagingArea
from pdlink.transfer.descriptors import GroupMove, Int64Array, LayerTable, PageRuns, PullBatch, pair_pages, single_pages
from pdlink.transfer.kept import Kept

MAX_SLOTS = 64
"""Slots of which a table remembers where its rows lie in them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [first_row, stop_row) at page positions [first_page, stop_page) of a pull, both counted within it."""

    first_row: int
    stop_row: int
    first_page: int
    stop_page: int
    nbytes: int

    @property
    def num_pages(self) -> int:
        return self.stop_page - self.first_page

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.stop_row)

    @property
    def pages(self) -> slice:
        return slice(self.first_page, self.stop_page)


@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """Where pages of some rows lie on one side: int64 columns of one length; bases are addresses, the rest bytes.

    Row i is the runs [starts[i], starts[i + 1]) of the columns, which lie one after another in a packed page; without
    `starts` every row is one run.
    """

    base: Int64Array
    stride: Int64Array
    page_bytes: Int64Array
    starts: Int64Array | None = None
    _layers: Kept[tuple[bool, int, int], LayerTable] = field(default_factory=lambda: Kept(MAX_SLOTS), init=False)

    @property
    def row_bytes(self) -> Int64Array:
        """int64 [rows]: of one packed page."""
        if self.starts is None:
            return self.page_bytes
        summed = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.page_bytes)])
        row_bytes: Int64Array = summed[self.starts[1:]] - summed[self.starts[:-1]]
        return row_bytes

    def take(self, rows: slice | Int64Array) -> PageTable:
        """These rows, in this order."""
        if self.starts is None:
            return PageTable(self.base[rows], self.stride[rows], self.page_bytes[rows])
        chosen = np.arange(len(self.starts) - 1, dtype=np.int64)[rows]
        runs, starts = runs_of(self.starts, chosen)
        return PageTable(self.base[runs], self.stride[runs], self.page_bytes[runs], starts)

    def runs_in(self, bases: Int64Array) -> list[tuple[Int64Array, Int64Array]]:
        """For each row, (offsets, sizes) of its runs in pages that lie from `bases` (int64 [rows]) on."""
        starts = np.arange(len(bases) + 1, dtype=np.int64) if self.starts is None else self.starts
        cuts = [slice(first, stop) for first, stop in itertools.pairwise(starts.tolist())]
        offsets = self.base - np.repeat(bases, np.diff(starts))
        return [(offsets[one], self.page_bytes[one]) for one in cuts]

    def into_slot(self, num_pages: int, address: int) -> LayerTable:
        """From the pages into a slot at `address`, `num_pages` of each row.

        Again for the same slot it is the same object, so that copiers know what they have made of it.
        """
        return self._layers.of((True, num_pages, address), lambda: self._into_slot(num_pages, address))

    def out_of_slot(self, num_pages: int, address: int) -> LayerTable:
        """The way back."""
        return self._layers.of((False, num_pages, address), lambda: self._into_slot(num_pages, address).reversed())

    def _into_slot(self, num_pages: int, address: int) -> LayerTable:
        row_bytes = self.row_bytes
        nbytes, rows = row_bytes * num_pages, np.arange(len(row_bytes), dtype=np.int64)
        packed = address + np.cumsum(nbytes) - nbytes
        if self.starts is not None:
            rows = np.repeat(rows, np.diff(self.starts))
            before = np.cumsum(self.page_bytes) - self.page_bytes  # within the packed page, from the row's first run on
            packed, row_bytes = packed[rows] + before - before[self.starts[rows]], row_bytes[rows]
        return LayerTable(rows, self.base, self.stride, packed, row_bytes, self.page_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Landing:
    """How packed pages of the rows of a pull become pages here, where they are no whole pages.

    `tables` has one for each page of the other side that a page here is made of, by turn. `parts` is what a packer must
    know to pack them: what this side holds of each component that is not packed as whole pages.
    """

    tables: tuple[PageTable, ...]
    parts: Mapping[str, Part]


def runs_of(starts: Int64Array, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Row i is runs [starts[i], starts[i + 1]): the runs of `rows` in their order, and the starts of these."""
    count = starts[rows + 1] - starts[rows]
    ends = np.cumsum(count)
    begins = np.concatenate([np.zeros(1, dtype=np.int64), ends])
    runs = np.repeat(starts[rows] - begins[:-1], count) + np.arange(int(begins[-1]), dtype=np.int64)
    return runs, begins


def cut(page_bytes: Int64Array, num_pages: int, piece_bytes: int) -> list[Piece]:
    """Cut rows (int64 [n] of page bytes) x `num_pages` into pieces of at most `piece_bytes`, row after row.

    Several whole rows share a piece where they fit; a row that does not fit is cut between pages. Raises `PlanError`
    where a single page does not fit.
    """
    pieces: list[Piece] = []
    sizes = page_bytes.tolist()
    row = 0
    while row < len(sizes) and num_pages:
        first, nbytes = row, 0
        while row < len(sizes) and nbytes + sizes[row] * num_pages <= piece_bytes:
            nbytes += sizes[row] * num_pages
            row += 1
        if row > first:
            pieces.append(Piece(first, row, 0, num_pages, nbytes))
            continue
        step = piece_bytes // sizes[row]
        if not step:
            raise PlanError(f"a page of {sizes[row]} bytes does not fit a staging slot of {piece_bytes} bytes")
        for start in range(0, num_pages, step):
            stop = min(start + step, num_pages)
            pieces.append(Piece(row, row + 1, start, stop, (stop - start) * sizes[row]))
        row += 1
    return pieces


def pack_runs(pages: Int64Array, merge: bool = True) -> PageRuns:
    """The page pairs of a pack of `pages` (int64 [n]), whatever the rows; merged into runs where that pays."""
    return (pair_pages if merge else single_pages)(pages, np.arange(len(pages), dtype=np.int64))


def unpack_runs(pages: Int64Array, first_page: int = 0, num_turns: int = 1, merge: bool = True) -> list[PageRuns]:
    """By turn, the page pairs of an unpack to `pages` (int64 [n]), which are those of page positions from `first_page`
    on, whatever the rows; merged into runs where that pays."""
    pair = pair_pages if merge else single_pages
    if num_turns == 1:
        return [pair(np.arange(len(pages), dtype=np.int64), pages)]
    return [pair(mine, pages[mine]) for mine in split_turns(first_page, len(pages), num_turns)]


def pack(runs: PageRuns, table: PageTable, slot_address: int) -> PullBatch:
    """The copies that gather pages of the table's rows into a slot; `runs` as `pack_runs` makes them."""
    return PullBatch("", (GroupMove(COMPONENT, runs, table.into_slot(runs.num_pages, slot_address)),))


def unpack(runs: Sequence[PageRuns], tables: Sequence[PageTable], slot_address: int) -> PullBatch:
    """The copies that scatter a slot to pages of the tables' rows; `runs` as `unpack_runs` makes them, and a table for
    each turn."""
    num_pages = sum(one.num_pages for one in runs)
    moves = (
        GroupMove(COMPONENT, one, table.out_of_slot(num_pages, slot_address))
        for one, table in zip(runs, tables, strict=True)
        if one.num_pages
    )
    return PullBatch("", tuple(moves))


def split_turns(first_page: int, num_pages: int, num_turns: int) -> list[Int64Array]:
    """By turn, which of page positions [first_page, first_page + num_pages) have it, counted from the first."""
    return [
        np.arange((turn - first_page) % num_turns, num_pages, num_turns, dtype=np.int64) for turn in range(num_turns)
    ]


def one_range(
    worker_id: str, source: StagingArea, source_slot: int, destination: StagingArea, slot: int, nbytes: int
) -> PullBatch:
    """The pull of the first `nbytes` bytes of an owner's slot into an own one."""
    figures = (0, source.base_address, source.slot_bytes, destination.base_address, destination.slot_bytes, nbytes)
    columns = np.array((*figures, source_slot, slot, 1), dtype=np.int64).reshape(-1, 1)
    return PullBatch(worker_id, (GroupMove(COMPONENT, PageRuns(*columns[6:]), LayerTable(*columns[:6])),))
