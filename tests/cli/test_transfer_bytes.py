"""What `pdlink bench transfer` moves: ranges that are what they claim, and a check that finds any wrong word."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.cli.transfer_bytes import Block, Shape

shapes = st.builds(
    Shape,
    page_bytes=st.integers(1, 8).map(lambda words: 8 * words),
    num_pages=st.integers(1, 12),
    num_layers=st.integers(1, 4),
    scattered=st.booleans(),
)


def move(shape: Shape, source: np.ndarray, target: np.ndarray, rows: tuple[np.ndarray, ...]) -> None:
    for at, to, nbytes in zip(*(column.tolist() for column in rows), strict=True):
        target[to : to + nbytes] = source[at : at + nbytes]


@given(shapes)
def test_the_ranges_bring_every_page_and_nothing_else(shape: Shape) -> None:
    source, target = (np.zeros(shape.block_bytes, dtype=np.uint8) for _ in range(2))
    Block(source.view(np.int64), shape).fill(3)
    there = Block(target.view(np.int64), shape)
    there.wipe()
    move(shape, source, target, shape.rows())
    assert there.find_wrong_page(3) == ""
    assert int((target.view(np.int64) != -1).sum()) * 8 == shape.nbytes


@given(shapes.filter(lambda shape: shape.scattered))
def test_no_scattered_page_has_a_neighbour_on_either_side(shape: Shape) -> None:
    for column in shape.rows()[:2]:
        assert all(after - before > shape.page_bytes for before, after in pairwise(sorted(column.tolist())))


@given(shapes, st.integers(1, 40))
def test_a_large_range_has_as_many_bytes_however_it_is_cut(shape: Shape, num_ranges: int) -> None:
    source, target = (np.zeros(shape.block_bytes, dtype=np.uint8) for _ in range(2))
    Block(source.view(np.int64), shape).fill(5)
    there = Block(target.view(np.int64), shape)
    there.wipe()
    rows = shape.range_rows(num_ranges)
    assert len(rows[0]) == num_ranges
    assert int(rows[2].sum()) == shape.nbytes
    move(shape, source, target, rows)
    assert there.find_wrong_range(5) == ""


@given(shapes)
def test_a_range_a_layer_brings_its_first_pages_and_touches_no_other_where_pages_are_scattered(shape: Shape) -> None:
    source, target = (np.zeros(shape.block_bytes, dtype=np.uint8) for _ in range(2))
    Block(source.view(np.int64), shape).fill(5)
    there = Block(target.view(np.int64), shape)
    there.wipe()
    rows = shape.layer_rows()
    assert len(rows[0]) == shape.num_layers
    move(shape, source, target, rows)
    assert there.find_wrong_layer(5) == ""
    assert int((target.view(np.int64) != -1).sum()) * 8 == shape.nbytes
    if shape.scattered:
        ends = (rows[0] + rows[2]).tolist()
        assert all(end < start for end, start in zip(ends, rows[0][1:].tolist(), strict=False))
        warm = shape.layer_rows(warm=True)
        assert set(warm[0].tolist()).isdisjoint(rows[0].tolist())
    target.view(np.int64)[int(rows[0][-1]) // 8] ^= 1
    assert there.find_wrong_layer(5).startswith(f"layer {shape.num_layers - 1}, ")


@given(shapes, st.data())
def test_one_wrong_word_is_found(shape: Shape, data: st.DataObject) -> None:
    source, target = (np.zeros(shape.block_bytes, dtype=np.uint8) for _ in range(2))
    Block(source.view(np.int64), shape).fill(7)
    there = Block(target.view(np.int64), shape)
    move(shape, source, target, shape.rows())
    moved = shape.rows()[1] if shape.scattered else np.arange(0, shape.block_bytes, shape.page_bytes)
    start = data.draw(st.sampled_from(moved.tolist()))
    word = start // 8 + data.draw(st.integers(0, shape.page_bytes // 8 - 1))
    target.view(np.int64)[word] ^= 1 << 40
    layer, page = divmod(start, shape.layer_bytes)
    assert there.find_wrong_page(7) == f"layer {layer}, page {page // shape.page_bytes}"


@given(shapes)
def test_what_is_there_from_an_earlier_fill_is_wrong(shape: Shape) -> None:
    source, target = (np.zeros(shape.block_bytes, dtype=np.uint8) for _ in range(2))
    Block(source.view(np.int64), shape).fill(1)
    there = Block(target.view(np.int64), shape)
    move(shape, source, target, shape.rows())
    assert there.find_wrong_page(1) == ""
    assert there.find_wrong_page(2) != ""


@given(shapes)
def test_a_damaged_source_is_found_by_both_checks(shape: Shape) -> None:
    for rows, check in ((shape.rows(), "find_wrong_page"), (shape.range_rows(2), "find_wrong_range")):
        source, target = (np.zeros(shape.block_bytes, dtype=np.uint8) for _ in range(2))
        block = Block(source.view(np.int64), shape)
        block.fill(4)
        block.damage()
        there = Block(target.view(np.int64), shape)
        move(shape, source, target, rows)
        assert getattr(there, check)(4) != ""


@given(shapes, st.data())
def test_tensors_are_filled_and_checked_as_arrays_are(shape: Shape, data: st.DataObject) -> None:
    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        words = np.zeros(shape.block_bytes // 8, dtype=np.int64)
        tensor = torch.zeros(shape.block_bytes // 8, dtype=torch.int64)
        array, there = Block(words, shape), Block(tensor, shape, "cpu")
        for block in (array, there):
            block.wipe()
            block.fill(9)
            if data.draw(st.booleans()):
                block.damage()
                block.damage()  # damaged twice is whole again
        assert np.array_equal(words, tensor.numpy())
        assert there.find_wrong_range(9) == array.find_wrong_range(9) == ""
        assert there.find_wrong_page(9) == array.find_wrong_page(9)
        tensor[0] ^= 1
        assert there.find_wrong_range(9) != ""
