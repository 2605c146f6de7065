import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.layout import MemoryKind, Region
from pdlink.transfer.digests import cells_in_order, first_difference, page_digests
from tests.transfer.values import ints

NUM_PAGES, NBYTES, STRIDE = 6, 40, 48


@pytest.fixture(scope="module")
def memory():
    return np.random.default_rng(7).integers(0, 256, (3, NUM_PAGES, STRIDE), dtype=np.uint8)


def regions(memory):
    base = memory.__array_interface__["data"][0]
    return [Region("latent", row, base + row * NUM_PAGES * STRIDE, STRIDE, NBYTES, NUM_PAGES) for row in range(3)]


@given(st.integers(0, 2), st.integers(0, NUM_PAGES - 1), st.integers(0, NBYTES * 8 - 1))
def test_a_flipped_bit_is_found_with_its_row_and_page(memory, row, page, bit):
    pages = ints([4, 0, 5, 1, 2, 3])
    before = page_digests(regions(memory), pages)
    memory[row, page, bit // 8] ^= 1 << (bit % 8)
    after = page_digests(regions(memory), pages)
    memory[row, page, bit // 8] ^= 1 << (bit % 8)
    assert first_difference(before, after) == (row, pages.tolist().index(page))
    assert int((before != after).sum()) == 1


def test_equal_bytes_at_other_addresses_have_equal_digests(memory):
    copy = memory.copy()
    pages = ints(range(NUM_PAGES))
    one, two = page_digests(regions(memory), pages), page_digests(regions(copy), pages)
    assert one.dtype == np.uint64
    assert one.shape == (3, NUM_PAGES)
    assert len(np.unique(one)) == one.size
    assert first_difference(one, two) is None


def test_bytes_between_pages_are_no_part_of_a_digest(memory):
    copy = memory.copy()
    copy[:, :, NBYTES:] ^= 0xFF
    pages = ints(range(NUM_PAGES))
    assert first_difference(page_digests(regions(memory), pages), page_digests(regions(copy), pages)) is None


def test_two_pages_that_changed_places_are_found(memory):
    mixed = page_digests(regions(memory), ints([1, 0, 2]))
    assert first_difference(page_digests(regions(memory), ints([0, 1, 2])), mixed) == (0, 0)


def test_no_pages_or_no_regions_have_no_digests(memory):
    assert page_digests(regions(memory), ints([])).shape == (3, 0)
    assert page_digests([], ints([1, 2])).shape == (0, 2)
    assert first_difference(page_digests([], ints([1])), page_digests([], ints([1]))) is None


def test_device_memory_is_never_read_as_host_memory():
    region = Region("latent", 0, 4096, NBYTES, NBYTES, 1, MemoryKind.CUDA)
    with pytest.raises(AssertionError, match="not host memory"):
        page_digests([region], ints([0]))


def test_both_sides_order_cells_by_component_and_layer():
    cells = [("index_k", 0), ("index_k", 8), ("latent", 2), ("latent", 10)]
    assert cells_in_order({"latent": (10, 2), "index_k": {8, 0}}) == cells
    assert cells_in_order({"index_k": (0, 8), "latent": (2, 10)}) == cells
