"""Owns how pages on a device are packed for digests that are made there: some at a time, into a block of its memory.

What is packed of a page, and what its digest is, is decided by whoever asks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pdlink.backends.copiers import Copier, open_copier
from pdlink.backends.staging import Block
from pdlink.errors import BackendError
from pdlink.layout.regions import MemoryKind, Region
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.digests import Runs
from pdlink.transfer.packing import PageTable, pack, pack_runs

BLOCK_BYTES = 16 << 20


class PagePacks:
    """Packs pages into `block`, `nbytes` of memory of one kind and device that `copier` reaches. For one thread at a
    time."""

    def __init__(self, copier: Copier, block: Block, nbytes: int) -> None:
        self._copier = copier
        self._block = block
        self._nbytes = nbytes

    def read(self, region: Region, pages: Int64Array, runs: Runs) -> Iterator[Region]:
        """Regions of packed pages, of `pages` (int64 [n]) of `region` in their order; each is valid until the next is
        asked for. The caller vouches that the region is mapped.

        Raises `BackendError` when the device cannot copy, and for pages that are larger than the block.
        """
        offsets, sizes = runs
        nbytes = int(sizes.sum())
        at_once = self._nbytes // nbytes
        if not at_once:
            raise BackendError(f"a packed page of {nbytes} bytes is too large to be digested in {self._nbytes} bytes")
        starts = np.array([0, len(sizes)], dtype=np.int64)
        table = PageTable(region.base_address + offsets, np.full(len(sizes), region.page_stride), sizes, starts)
        for first in range(0, len(pages), at_once):
            some = pages[first : first + at_once]
            self._copier.copy(pack(pack_runs(some, self._copier.wants_runs), table, self._block.address), lambda: False)
            base, memory = self._block.address, (region.memory, region.device)
            yield Region(region.component, region.layer, base, nbytes, nbytes, len(some), *memory)

    def close(self) -> None:
        self._copier.close()
        self._block.close()


def open_packs(device: int) -> PagePacks:
    """On one CUDA device. Takes memory there, which may wait for work that an engine has launched."""
    # Here, because a process without device memory has no use for it.
    from pdlink.backends.cuda_driver import DeviceBlock

    return PagePacks(open_copier(MemoryKind.CUDA, device), DeviceBlock(BLOCK_BYTES, device), BLOCK_BYTES)
