"""Owns the pools of the two pdlink processes of `pdlink bench transfer`: memory, regions, layout. It moves nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pdlink.cli.transfer_bytes import Block, Shape
from pdlink.layout.components import CacheLayout, latent
from pdlink.layout.regions import MemoryKind, Region

PAGE_SIZE = 8
COMPONENT = "latent"
GROUP = "kv"


@dataclass(slots=True)
class Pool:
    """A pool in one allocation, its regions, and the block that fills and checks it.

    Other processes find host memory at `path`.
    """

    block: Block
    path: str
    regions: tuple[Region, ...]
    close: Callable[[], None]


def make_layout(shape: Shape) -> CacheLayout:
    rows = shape.page_bytes // PAGE_SIZE
    return CacheLayout(shape.num_layers, (latent(PAGE_SIZE, range(shape.num_layers), bytes_per_token=rows),))


def open_pool(shape: Shape, device: int) -> Pool:
    """Memory for a pool, touched: shared memory of the host for `device` -1, else of that GPU."""
    if device < 0:
        from pdlink.backends.shm import SHM_DIR, Segment

        segment = Segment.create(shape.block_bytes)
        words = segment.array.view(np.int64)
        words[:] = 0
        regions = _regions(shape, segment.address, MemoryKind.HOST, 0)
        return Pool(Block(words, shape), f"{SHM_DIR}/{segment.name}", regions, segment.close)
    import torch

    where = f"cuda:{device}"
    torch.cuda.set_device(device)
    torch.cuda.empty_cache()  # so that this is an allocation of its own, and not a part of one that was used before
    tensor = torch.zeros(shape.block_bytes // 8, dtype=torch.int64, device=where)
    torch.cuda.synchronize(where)
    # The tensor goes with its block; regions are addresses.
    regions = _regions(shape, tensor.data_ptr(), MemoryKind.CUDA, device)
    return Pool(Block(tensor, shape, where), "", regions, lambda: None)


def _regions(shape: Shape, address: int, memory: MemoryKind, device: int) -> tuple[Region, ...]:
    return tuple(
        Region(
            COMPONENT,
            layer,
            address + layer * shape.layer_bytes,
            shape.page_bytes,
            shape.page_bytes,
            shape.pool_pages,
            memory,
            device,
        )
        for layer in range(shape.num_layers)
    )
