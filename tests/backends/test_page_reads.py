"""Pages read through a block are the pages: whatever the block holds at once, and in the order that was asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.backends.copiers import HostCopier
from pdlink.backends.page_reads import BlockReads, PageReads
from pdlink.backends.staging import PrivateBlock
from pdlink.errors import BackendError
from pdlink.layout.regions import MemoryKind, Region
from pdlink.transfer.digests import DigestKind, page_digests

NUM_PAGES, NBYTES, STRIDE = 9, 40, 48
MEMORY = np.random.default_rng(3).integers(0, 256, (2, NUM_PAGES, STRIDE), dtype=np.uint8)


def regions() -> list[Region]:
    base = MEMORY.__array_interface__["data"][0]
    return [Region("latent", row, base + row * NUM_PAGES * STRIDE, STRIDE, NBYTES, NUM_PAGES) for row in range(2)]


@given(st.lists(st.integers(0, NUM_PAGES - 1), unique=True), st.integers(NBYTES, 5 * NBYTES))
def test_digests_through_a_block_are_those_of_the_pages_in_place(pages: list[int], nbytes: int) -> None:
    ids = np.array(pages, dtype=np.int64)
    reads = BlockReads(HostCopier(), PrivateBlock(nbytes), nbytes)
    for kind in DigestKind:
        assert np.array_equal(page_digests(kind, regions(), ids, reads.read), page_digests(kind, regions(), ids))


def test_a_page_that_the_block_cannot_hold_is_refused_with_both_sizes() -> None:
    reads = BlockReads(HostCopier(), PrivateBlock(NBYTES - 1), NBYTES - 1)
    with pytest.raises(BackendError, match=r"page of 40 bytes .* through 39 bytes"):
        list(reads.read(regions()[0], np.array([1], dtype=np.int64)))


def test_host_memory_is_read_where_it_lies_and_a_closed_reader_opens_no_device() -> None:
    reads = PageReads()
    pages = np.array([4, 0], dtype=np.int64)
    ((found, ids),) = reads(regions()[1], pages)
    assert np.shares_memory(found, MEMORY)
    assert np.array_equal(found[ids], MEMORY[1, [4, 0], :NBYTES])
    reads.close()
    reads.close()
    device = Region("latent", 0, 1 << 40, STRIDE, NBYTES, NUM_PAGES, MemoryKind.CUDA, 0)
    with pytest.raises(BackendError, match="closed"):
        list(reads(device, pages))
