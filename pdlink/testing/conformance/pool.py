"""Owns the memory of the conformance suite: pools of recognisable pages in host or device memory. It moves nothing."""

from __future__ import annotations

import mmap

import numpy as np

from pdlink.backends.shm import Segment
from pdlink.layout.components import CacheLayout, latent
from pdlink.layout.layer_plan import OwnedLayers
from pdlink.testing.conformance.setup import MemorySource
from pdlink.testing.pattern import SENTINEL, Bytes, PatternPool

TRANSFER = "conformance"
MAP_NORESERVE = 0x4000  # Linux; the mmap module has no name for it


class PrivateBlock:
    """Anonymous memory of this process, zero-filled, backed by a page when that is first touched."""

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._map = mmap.mmap(-1, nbytes, flags=flags)
        self.array: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.address = int(self.array.__array_interface__["data"][0])

    @classmethod
    def create(cls, nbytes: int) -> PrivateBlock:
        return cls(nbytes)

    def close(self) -> None:
        """Forget the memory; it is unmapped when the last view of it has gone."""
        self.array = np.zeros(0, dtype=np.uint8)


def make_pool(
    source: MemorySource,
    num_layers: int,
    num_pages: int,
    page_bytes: int,
    gap: int = 0,
    *,
    sparse: bool = False,
    device: int = 0,
) -> PatternPool:
    """A pool of one component with pages of `page_bytes` bytes (a multiple of 4), `gap` bytes apart.

    `device` is the number of a GPU, for memory that lies on one.
    """
    layout = CacheLayout(max(num_layers, 1), (latent(4, range(max(num_layers, 1)), bytes_per_token=page_bytes // 4),))
    owned = {"latent": tuple(range(num_layers))}
    if source is MemorySource.CUDA:
        return _device_pool(layout, owned, num_pages, gap, sparse, device)
    create = Segment.create if source is MemorySource.SHARED else PrivateBlock.create
    return PatternPool(layout, owned, num_pages, page_gap=gap, allocate=create, sparse=sparse)


def _device_pool(
    layout: CacheLayout, owned: OwnedLayers, num_pages: int, gap: int, sparse: bool, device: int
) -> PatternPool:
    import torch

    from pdlink.testing.device_pool import DevicePool

    return DevicePool(layout, owned, num_pages, torch.device("cuda", device), page_gap=gap, sparse=sparse)


def count_landed(pool: PatternPool) -> int:
    """Pages of which the first bytes are not what an untouched pool holds."""
    landed = 0
    for region in pool.regions:
        heads = pool.heads(region.component, region.layer, 8)
        landed += int(np.any(heads != SENTINEL, axis=1).sum())
    return landed


def hand_out_again(pool: PatternPool) -> None:
    """Write over every page, as its next user would; `find_touched` then shows what landed later."""
    pool.wipe()
