"""Owns how the pages of a pull lie inside staging slots: the cut into pieces, and the copies in and out. No I/O.

A piece is a rectangle of rows x page positions. In a slot its rows follow each other in their order, and within a row
its pages, so that both sides know where everything lies from the rows, their page bytes and the number of pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pdlink.errors import PlanError
from pdlink.layout.staging import COMPONENT, StagingArea
from pdlink.transfer.descriptors import GroupMove, Int64Array, LayerTable, PageRuns, PullBatch, pair_pages


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
    """Where pages of some rows lie on one side: int64 columns of one length; bases are addresses, the rest bytes."""

    base: Int64Array
    stride: Int64Array
    page_bytes: Int64Array

    def take(self, rows: slice) -> PageTable:
        return PageTable(self.base[rows], self.stride[rows], self.page_bytes[rows])

    def slot(self, num_pages: int, address: int) -> PageTable:
        """The same rows packed into a slot at `address`, `num_pages` pages of each."""
        nbytes = self.page_bytes * num_pages
        return PageTable(address + np.cumsum(nbytes) - nbytes, self.page_bytes, self.page_bytes)


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


def pack(pages: Int64Array, table: PageTable, slot_address: int) -> PullBatch:
    """The copies that gather `pages` (int64 [n]) of the table's rows into a slot."""
    return _moves(pages, np.arange(len(pages), dtype=np.int64), table, table.slot(len(pages), slot_address))


def unpack(pages: Int64Array, table: PageTable, slot_address: int) -> PullBatch:
    """The copies that scatter a slot to `pages` (int64 [n]) of the table's rows."""
    return _moves(np.arange(len(pages), dtype=np.int64), pages, table.slot(len(pages), slot_address), table)


def one_range(
    worker_id: str, source: StagingArea, source_slot: int, destination: StagingArea, slot: int, nbytes: int
) -> PullBatch:
    """The pull of the first `nbytes` bytes of an owner's slot into an own one."""

    def column(value: int) -> Int64Array:
        return np.array([value], dtype=np.int64)

    layers = LayerTable(
        column(0),
        column(source.base_address),
        column(source.slot_bytes),
        column(destination.base_address),
        column(destination.slot_bytes),
        column(nbytes),
    )
    runs = PageRuns(column(source_slot), column(slot), column(1))
    return PullBatch(worker_id, (GroupMove(COMPONENT, runs, layers),))


def _moves(source: Int64Array, destination: Int64Array, of: PageTable, to: PageTable) -> PullBatch:
    rows = np.arange(len(of.base), dtype=np.int64)
    layers = LayerTable(rows, of.base, of.stride, to.base, to.stride, of.page_bytes)
    return PullBatch("", (GroupMove(COMPONENT, pair_pages(source, destination), layers),))
