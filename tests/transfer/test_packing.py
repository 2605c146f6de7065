"""Pages that are cut, packed and unpacked come out as they went in, and in no other byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.backends.host_copy import copy
from pdlink.errors import PlanError
from pdlink.layout.staging import StagingArea
from pdlink.transfer.packing import PageTable, cut, one_range, pack, pack_runs, unpack, unpack_runs

NUM_PAGES = 9
BASE = 1 << 40


@given(
    st.lists(st.integers(1, 60), max_size=6),
    st.integers(0, 12),
    st.integers(1, 400),
)
def test_a_cut_has_every_cell_once_and_no_piece_over_the_limit(sizes: list[int], num_pages: int, limit: int) -> None:
    page_bytes = np.array(sizes, dtype=np.int64)
    if num_pages and sizes and max(sizes) > limit:
        with pytest.raises(PlanError, match="does not fit a staging slot"):
            cut(page_bytes, num_pages, limit)
        return
    times = np.zeros((len(sizes), num_pages), dtype=np.int64)
    pieces = cut(page_bytes, num_pages, limit)
    for piece in pieces:
        times[piece.rows, piece.pages] += 1
        assert piece.nbytes == int(page_bytes[piece.rows].sum()) * piece.num_pages
        assert 0 < piece.nbytes <= limit
    assert bool(np.all(times == 1))


def test_rows_that_fit_together_share_a_piece() -> None:
    pieces = cut(np.array([10, 10, 10, 40], dtype=np.int64), 2, 60)
    assert [(one.first_row, one.stop_row, one.first_page, one.stop_page) for one in pieces] == [
        (0, 3, 0, 2),
        (3, 4, 0, 1),
        (3, 4, 1, 2),
    ]


class Side:
    """Rows of pages in one buffer, with gaps, at real addresses."""

    def __init__(self, sizes: list[int], gap: int) -> None:
        strides = [size + gap for size in sizes]
        starts = np.cumsum([0, *(stride * NUM_PAGES for stride in strides)])
        self.bytes = np.full(int(starts[-1]), 0xEE, dtype=np.uint8)
        address = self.bytes.__array_interface__["data"][0]
        self.table = PageTable(
            np.array(address + starts[:-1], dtype=np.int64),
            np.array(strides, dtype=np.int64),
            np.array(sizes, dtype=np.int64),
        )
        self._starts = starts

    def page(self, row: int, page: int) -> np.ndarray:
        start = int(self._starts[row] + page * self.table.stride[row])
        return self.bytes[start : start + int(self.table.page_bytes[row])]


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.integers(0, 3),
    st.integers(0, 3),
    st.lists(st.integers(0, NUM_PAGES - 1), min_size=1, max_size=NUM_PAGES, unique=True),
    st.randoms(use_true_random=False),
    st.integers(40, 200),
    st.booleans(),
)
def test_what_is_packed_and_unpacked_is_the_pages_and_nothing_else(
    sizes, gap, other_gap, pages, chance, limit, merge
) -> None:
    source, target = Side(sizes, gap), Side(sizes, other_gap)
    source.bytes[:] = np.frombuffer(chance.randbytes(len(source.bytes)), dtype=np.uint8)
    here = chance.sample(range(NUM_PAGES), len(pages))
    slot = np.full(limit + 16, 0xDD, dtype=np.uint8)
    address = slot.__array_interface__["data"][0] + 8
    for piece in cut(source.table.page_bytes, len(pages), limit):
        slot[:] = 0xDD
        asked = np.array(pages, dtype=np.int64)[piece.pages]
        wanted = np.array(here, dtype=np.int64)[piece.pages]
        assert copy(pack(pack_runs(asked, merge), source.table.take(piece.rows), address), lambda: False)
        # The slot holds the pages row after row, without a gap and with nothing around them.
        packed = [source.page(row, page) for row in range(piece.first_row, piece.stop_row) for page in asked.tolist()]
        assert slot[8 : 8 + piece.nbytes].tobytes() == b"".join(one.tobytes() for one in packed)
        assert {*slot[:8].tolist(), *slot[8 + piece.nbytes :].tolist()} == {0xDD}
        assert copy(unpack(unpack_runs(wanted, merge=merge), (target.table.take(piece.rows),), address), lambda: False)
    expected = Side(sizes, other_gap)
    for row in range(len(sizes)):
        for theirs, ours in zip(pages, here, strict=True):
            expected.page(row, ours)[:] = source.page(row, theirs)
    assert np.array_equal(target.bytes, expected.bytes)


def test_a_copy_that_is_stopped_says_so_and_leaves_the_rest() -> None:
    source, target = Side([8], 0), Side([8], 0)
    source.bytes[:] = 1
    pages = np.arange(NUM_PAGES, dtype=np.int64)
    slot = np.zeros(8 * NUM_PAGES, dtype=np.uint8)
    assert not copy(unpack(unpack_runs(pages), (target.table,), slot.__array_interface__["data"][0]), lambda: True)
    assert set(target.bytes.tolist()) == {0xEE}


def test_neighbouring_pages_are_packed_in_one_run() -> None:
    table = PageTable(*(np.array([one], dtype=np.int64) for one in (BASE, 64, 64)))
    pages = np.array([3, 4, 5, 9], dtype=np.int64)
    assert pack(pack_runs(pages), table, 1 << 20).num_descriptors == 2
    assert pack(pack_runs(pages, merge=False), table, 1 << 20).num_descriptors == 4


def test_the_same_slot_gives_the_same_table_and_another_way_or_slot_another() -> None:
    table = PageTable(*(np.array([one], dtype=np.int64) for one in (BASE, 64, 64)))
    there = table.into_slot(4, 1 << 20)
    assert table.into_slot(4, 1 << 20) is there
    others = [table.out_of_slot(4, 1 << 20), table.into_slot(4, 1 << 21), table.into_slot(3, 1 << 20)]
    assert len({there, *others}) == 4
    assert [others[0].source_base.tolist(), others[0].destination_base.tolist()] == [[1 << 20], [BASE]]


def test_one_range_goes_from_slot_to_slot() -> None:
    batch = one_range("w", StagingArea(BASE, 4096, 8), 3, StagingArea(1 << 20, 8192, 2), 1, 700)
    (rows,) = batch.expand()
    assert rows.source.tolist() == [BASE + 3 * 4096]
    assert rows.destination.tolist() == [(1 << 20) + 8192]
    assert rows.nbytes.tolist() == [700]
    assert batch.worker_id == "w"
