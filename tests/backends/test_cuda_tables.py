"""What a gather kernel is told: tables that make every byte of a move exactly one thread block's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.backends import cuda_copy
from pdlink.backends.cuda_copy import LayerRows, fitting
from pdlink.backends.cuda_kernels import CHUNK_BYTES
from pdlink.transfer.descriptors import GroupMove, LayerTable, PageRuns
from tests.transfer.values import ints


def make_move(page_bytes, pairs, gap=0):
    """Layers of `page_bytes`, far apart, with page pairs as runs of one page."""
    num_layers = len(page_bytes)
    sizes = ints(page_bytes)
    bases = ints(range(num_layers)) * (1 << 40)
    table = LayerTable(ints(range(num_layers)), bases, sizes + gap, bases + (1 << 39), sizes + gap, sizes)
    source, destination = (ints(column) for column in zip(*pairs, strict=True))
    return GroupMove("kv", PageRuns(source, destination, np.ones(len(pairs), dtype=np.int64)), table)


def copied(move):
    """(source, destination, nbytes) of every unit, as `gather.cu` works them out."""
    rows, num_units = LayerRows.of(move.layers).rows_of(move.runs.num_pages)
    source_pages, destination_pages = move.runs.source_pages(), move.runs.destination_pages()
    for unit in range(num_units):
        layer = rows[np.searchsorted(rows[:, 7], unit, side="right") - 1].tolist()
        source_base, source_stride, destination_base, destination_stride, page_bytes, unit_bytes, per_page, first = (
            layer
        )
        page, part = divmod(unit - first, per_page)
        offset = part * unit_bytes
        nbytes = min(unit_bytes, page_bytes - offset)
        yield (
            source_base + int(source_pages[page]) * source_stride + offset,
            destination_base + int(destination_pages[page]) * destination_stride + offset,
            nbytes,
        )


def merged(ranges):
    """The same bytes as ranges in order of destination, neighbours made one. A byte that is written twice stays two."""
    done = []
    for source, destination, nbytes in sorted(ranges, key=lambda one: one[1]):
        if done and (done[-1][0] + done[-1][2], done[-1][1] + done[-1][2]) == (source, destination):
            done[-1] = (*done[-1][:2], done[-1][2] + nbytes)
        else:
            done.append((source, destination, nbytes))
    return done


sizes = st.integers(1, 3 * CHUNK_BYTES)
pages = st.lists(
    st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=5, unique_by=lambda one: one[1]
)


@given(st.lists(sizes, min_size=1, max_size=4), pages, st.sampled_from([0, 64]))
def test_the_units_of_a_move_are_its_pages_byte_for_byte(page_bytes, pairs, gap):
    move = make_move(page_bytes, pairs, gap)
    step = [size + gap for size in page_bytes]
    wanted = [
        ((layer << 40) + source * step[layer], (layer << 40) + (1 << 39) + destination * step[layer], size)
        for layer, size in enumerate(page_bytes)
        for source, destination in pairs
    ]
    units = list(copied(move))
    assert all(0 < nbytes <= CHUNK_BYTES for _, _, nbytes in units)
    assert merged(units) == merged(wanted)


@pytest.mark.parametrize(
    ("page_bytes", "gap", "word"),
    [((41_984, 8_448), 0, 16), ((132,), 0, 4), ((133,), 0, 1), ((64,), 4, 4), ((64,), 1, 1), ((64, 12), 0, 4)],
)
def test_the_widest_word_that_divides_everything_is_used(page_bytes, gap, word):
    assert LayerRows.of(make_move(page_bytes, [(0, 0), (3, 1)], gap).layers).word_bytes == word


@given(st.integers(1, 40), st.integers(1, 400))
def test_a_move_that_no_table_holds_is_cut_into_ones_that_fit(num_layers, num_pages):
    move = make_move([64] * num_layers, [(2 * page, page) for page in range(num_pages)])
    room = 1024
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_copy, "TABLE_BYTES", room)
        pieces = list(fitting(move))
    for piece in pieces:
        assert 16 * piece.runs.num_pages + 64 * piece.layers.num_layers <= room
    cells = [
        (int(row), int(source), int(destination))
        for piece in pieces
        for row in piece.layers.rows
        for source, destination in zip(piece.runs.source_pages(), piece.runs.destination_pages(), strict=True)
    ]
    assert sorted(cells) == [(row, 2 * page, page) for row in range(num_layers) for page in range(num_pages)]
