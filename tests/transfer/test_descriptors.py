import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlink.transfer.descriptors import GroupMove, LayerTable, PullBatch, pair_pages
from tests.transfer.values import ints

NUM_PAGES = 12
MARGIN = 64
UNTOUCHED = 0xEE


@st.composite
def page_pairs(draw):
    """(source pages, destination pages): distinct on each side, with a bias towards runs."""
    count = draw(st.integers(0, NUM_PAGES))
    if draw(st.booleans()):
        first = draw(st.integers(0, NUM_PAGES - count)), draw(st.integers(0, NUM_PAGES - count))
        pairs = [(first[0] + n, first[1] + n) for n in range(count)]
        return tuple(zip(*draw(st.permutations(pairs)), strict=True)) if count else ((), ())
    pages = st.lists(st.integers(0, NUM_PAGES - 1), min_size=count, max_size=count, unique=True)
    return tuple(draw(pages)), tuple(draw(pages))


@st.composite
def tables(draw):
    """Layers of random page bytes whose regions follow each other directly, dense or with gaps, on both sides."""
    columns, source, destination = [], MARGIN, MARGIN
    for row in range(draw(st.integers(1, 4))):
        nbytes = draw(st.integers(1, 24))
        strides = [nbytes + draw(st.sampled_from([0, 0, 1, 7])) for _ in range(2)]
        columns.append((row, source, strides[0], destination, strides[1], nbytes))
        source += (NUM_PAGES - 1) * strides[0] + nbytes
        destination += (NUM_PAGES - 1) * strides[1] + nbytes
    return LayerTable(*(ints(column) for column in zip(*columns, strict=True))), source, destination


def moved_page_by_page(table, source, pages, size):
    """What the destination holds when each page of each layer is copied on its own."""
    memory = np.full(size, UNTOUCHED, dtype=np.uint8)
    for row in range(table.num_layers):
        nbytes = int(table.page_bytes[row])
        for from_page, to_page in zip(*pages, strict=True):
            start = int(table.source_base[row] + from_page * table.source_stride[row])
            end = int(table.destination_base[row] + to_page * table.destination_stride[row])
            memory[end : end + nbytes] = source[start : start + nbytes]
    return memory


@given(page_pairs(), tables(), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_coalesced_moves_give_the_bytes_of_a_page_by_page_copy(pages, drawn, max_rows, seed):
    table, source_end, destination_end = drawn
    source = np.random.default_rng(seed).integers(0, 256, source_end + MARGIN, dtype=np.uint8)
    memory = np.full(destination_end + MARGIN, UNTOUCHED, dtype=np.uint8)
    move = GroupMove("kv", pair_pages(ints(pages[0]), ints(pages[1])), table)
    batch = PullBatch("w0", (move,))
    num_rows = num_bytes = 0
    for piece in batch.expand(max_rows):
        assert 0 < len(piece) <= max_rows
        assert {piece.source.dtype, piece.destination.dtype, piece.nbytes.dtype} == {np.dtype(np.int64)}
        for start, end, nbytes in zip(piece.source, piece.destination, piece.nbytes, strict=True):
            memory[end : end + nbytes] = source[start : start + nbytes]
        num_rows += len(piece)
        num_bytes += int(piece.nbytes.sum())
    assert np.array_equal(memory, moved_page_by_page(table, source, pages, len(memory)))
    assert num_bytes == batch.nbytes == len(pages[0]) * int(table.page_bytes.sum())
    assert num_rows == batch.num_descriptors


@given(page_pairs(), tables())
def test_no_move_crosses_from_one_region_into_the_next(pages, drawn):
    table = drawn[0]
    move = GroupMove("kv", pair_pages(ints(pages[0]), ints(pages[1])), table)
    spans = [
        [(int(b), int(b + (NUM_PAGES - 1) * s + n)) for b, s, n in zip(base, stride, table.page_bytes, strict=True)]
        for base, stride in (
            (table.source_base, table.source_stride),
            (table.destination_base, table.destination_stride),
        )
    ]
    for piece in PullBatch("w0", (move,)).expand():
        for side, addresses in zip(spans, (piece.source, piece.destination), strict=True):
            for start, nbytes in zip(addresses, piece.nbytes, strict=True):
                assert any(low <= start and start + nbytes <= high for low, high in side)


@given(page_pairs())
def test_runs_hold_exactly_the_pairs_and_cannot_be_merged_further(pages):
    runs = pair_pages(ints(pages[0]), ints(pages[1]))
    found = list(zip(runs.source_pages().tolist(), runs.destination_pages().tolist(), strict=True))
    assert sorted(found) == sorted(zip(*pages, strict=True))
    assert runs.num_pages == len(pages[0])
    every = set(found)
    starts = {(int(a), int(b)) for a, b in zip(runs.source, runs.destination, strict=True)}
    assert all((a - 1, b - 1) not in every for a, b in starts)
    assert runs.num_runs == sum((a - 1, b - 1) not in every for a, b in found)


@given(page_pairs(), st.randoms())
def test_the_order_in_which_pairs_are_listed_makes_no_difference(pages, random):
    pairs = list(zip(*pages, strict=True))
    random.shuffle(pairs)
    other = tuple(zip(*pairs, strict=True)) if pairs else ((), ())
    one, two = pair_pages(ints(pages[0]), ints(pages[1])), pair_pages(ints(other[0]), ints(other[1]))
    for name in ("source", "destination", "count"):
        assert np.array_equal(getattr(one, name), getattr(two, name))


def test_pages_in_order_on_both_sides_are_one_run():
    runs = pair_pages(ints(range(100, 4196)), ints(range(7, 4103)))
    assert (runs.source.tolist(), runs.destination.tolist(), runs.count.tolist()) == ([100], [7], [4096])


def test_a_source_page_may_go_to_two_places():
    runs = pair_pages(ints([5, 5]), ints([1, 9]))
    assert runs.num_runs == 2
    assert sorted(runs.destination.tolist()) == [1, 9]


def test_no_pages_are_no_moves():
    move = GroupMove("kv", pair_pages(ints([]), ints([])), LayerTable(*([ints([8])] * 6)))
    assert (move.nbytes, move.num_descriptors) == (0, 0)
    assert list(PullBatch("w0", (move,)).expand()) == []
    assert list(PullBatch("w0", ()).expand()) == []


def test_offsets_of_far_pages_do_not_wrap_at_two_or_four_gib():
    nbytes = 41_984
    table = LayerTable(ints([0]), ints([1 << 44]), ints([nbytes]), ints([1 << 45]), ints([nbytes + 16]), ints([nbytes]))
    page = 3_000_000
    assert page * nbytes > 1 << 36
    (piece,) = PullBatch("w0", (GroupMove("kv", pair_pages(ints([page]), ints([page + 1])), table),)).expand()
    assert piece.source.tolist() == [(1 << 44) + page * nbytes]
    assert piece.destination.tolist() == [(1 << 45) + (page + 1) * (nbytes + 16)]


def test_a_run_longer_than_four_gib_is_one_move_with_its_true_length():
    nbytes, count = 41_984, 200_000
    table = LayerTable(ints([0]), ints([4096]), ints([nbytes]), ints([1 << 45]), ints([nbytes]), ints([nbytes]))
    runs = pair_pages(ints(range(count)), ints(range(count)))
    (piece,) = PullBatch("w0", (GroupMove("kv", runs, table),)).expand()
    assert piece.nbytes.tolist() == [count * nbytes]


@pytest.mark.parametrize(("num_pages", "num_layers"), [(100, 3), (7, 100), (1, 1)])
@settings(max_examples=10)
@given(st.integers(1, 64))
def test_no_piece_is_larger_than_asked(num_pages, num_layers, max_rows):
    table = LayerTable(*(ints(range(1, num_layers + 1)) for _ in range(5)), ints([1] * num_layers))
    runs = pair_pages(ints(range(num_pages)), ints(range(0, 2 * num_pages, 2)))
    pieces = list(PullBatch("w0", (GroupMove("kv", runs, table),)).expand(max_rows))
    assert max(map(len, pieces)) <= max_rows
    assert sum(map(len, pieces)) == num_pages * num_layers
