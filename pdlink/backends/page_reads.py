"""Owns how pages are read as host memory, wherever they lie: in place, or through a block that a device copies them to.

For digests, whose definition needs bytes. What moves pages between ranks reads none of them here.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from pdlink.backends.copiers import Copier, open_copier
from pdlink.backends.staging import Block
from pdlink.errors import BackendError
from pdlink.layout.regions import MemoryKind, Region
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.digests import Bytes, host_pages
from pdlink.transfer.packing import PageTable, pack, pack_runs

BLOCK_BYTES = 16 << 20


class PageReads:
    """Reads pages of any region of this process. Thread-safe; `close` twice is fine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: dict[int, BlockReads] = {}
        self._closed = False

    def __call__(self, region: Region, pages: Int64Array) -> Iterator[tuple[Bytes, Int64Array]]:
        """The bytes of `pages` (int64 [n]) of `region`, as a `PageReader` gives them.

        The caller vouches that the region is mapped. Raises `BackendError` when a device cannot copy.
        """
        if region.memory is MemoryKind.HOST:
            yield from host_pages(region, pages)
            return
        with self._lock:  # one block for each device
            if self._closed:
                raise BackendError("nothing is read any more: the worker is closed")
            if region.device not in self._blocks:
                self._blocks[region.device] = _pinned(region.device)
            yield from self._blocks[region.device].read(region, pages)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            blocks, self._blocks = self._blocks, {}
        for one in blocks.values():
            with suppress(BackendError):  # a device that has failed holds nothing that matters
                one.close()


class BlockReads:
    """Reads pages through one block of host memory, some of them at a time, by a copier that reaches both."""

    def __init__(self, copier: Copier, block: Block, nbytes: int) -> None:
        self._copier = copier
        self._block = block
        self._bytes: Bytes = np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(block.address))

    def read(self, region: Region, pages: Int64Array) -> Iterator[tuple[Bytes, Int64Array]]:
        """As `PageReads`. Raises `BackendError` for pages that are larger than the block."""
        nbytes = region.page_bytes
        at_once = len(self._bytes) // nbytes
        if not at_once:
            raise BackendError(f"a page of {nbytes} bytes is too large to be read through {len(self._bytes)} bytes")
        columns = (np.array([one], dtype=np.int64) for one in (region.base_address, region.page_stride, nbytes))
        table = PageTable(*columns)
        for first in range(0, len(pages), at_once):
            some = pages[first : first + at_once]
            self._copier.copy(pack(pack_runs(some, self._copier.wants_runs), table, self._block.address), lambda: False)
            yield self._bytes[: len(some) * nbytes].reshape(len(some), nbytes), np.arange(len(some), dtype=np.int64)

    def close(self) -> None:
        self._copier.close()
        self._block.close()


def _pinned(device: int) -> BlockReads:
    # Here, because a process without device memory has no use for it.
    from pdlink.backends.cuda_driver import PinnedBlock

    return BlockReads(open_copier(MemoryKind.CUDA, device), PinnedBlock(BLOCK_BYTES, device), BLOCK_BYTES)
