"""Owns what a scenario needs on one rank: layouts, pools with recognisable bytes, and checks of what a read gave."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from pdlink.errors import PdlinkError
from pdlink.layout import CacheLayout, LayerPlan, ParallelSizes, RankCoordinates
from pdlink.layout.components import heads, index_k, latent
from pdlink.memory.broadcast_reader import BroadcastReader
from pdlink.memory.communicator import GroupCommunicator
from pdlink.memory.forward import ReadSpan
from pdlink.memory.layer_reader import LayerReader
from pdlink.memory.owners import ShardOwners
from pdlink.memory.peer_reader import PeerReader
from pdlink.memory.pool_device import PoolDevice
from pdlink.memory.sharded_pool import LayerShardedPool
from tests.memory.thread_device import ThreadDevice

PAGE = 64
UNTOUCHED = 0xEE


def dsa_layout(num_layers: int) -> CacheLayout:
    """MLA latent and, on some layers only, indexer keys in a page-shaped buffer."""
    index_layers = [layer for layer in range(num_layers) if layer < 1 or layer % 3 != 1]
    return CacheLayout(num_layers, (latent(PAGE, range(num_layers), bytes_per_token=656), index_k(PAGE, index_layers)))


def gqa_layout(num_layers: int) -> CacheLayout:
    """Keys and values of several heads, in pages of an odd size."""
    both = [heads(name, 7, range(num_layers), num_heads=3, head_bytes=10, dtype="bfloat16") for name in ("k", "v")]
    return CacheLayout(num_layers, tuple(both))


def pattern(component: str, layer: int, shape: Sequence[int], salt: int = 0) -> np.ndarray:
    """uint8 bytes that no other layer, component or salt has."""
    return np.random.default_rng(zlib.crc32(f"{component}/{layer}/{salt}".encode())).integers(
        0, 256, tuple(shape), dtype=np.uint8
    )


class World:
    """One rank's pools and readers; closes them when the scenario ends.

    `kind` is that of the readers, with "+ahead" for pools that fetch ahead, "+lanes" for pools on a device of pretence,
    and "+cuda" for pools on a GPU of its own.
    """

    def __init__(self, rank: int, num_ranks: int, kind: str = "broadcast") -> None:
        self.kind, *options = kind.split("+")
        self.prefetch = "ahead" in options
        self.has_lanes = "lanes" in options
        self.has_cuda = "cuda" in options
        self.rank = rank
        self.num_ranks = num_ranks
        self._open: list[LayerShardedPool | LayerReader | PoolDevice] = []

    def pool(
        self,
        layout: CacheLayout,
        num_pages: int = 16,
        *,
        groups: Sequence[Sequence[int]] | None = None,
        plan: Callable[[CacheLayout, ParallelSizes], LayerPlan] = LayerPlan.balanced,
        communicator: type[GroupCommunicator] = GroupCommunicator,
        timeout_s: float = 60.0,
        scratch_slots: int = 2,
        salt: int = 0,
        peer: type[PeerReader] = PeerReader,
        broadcast: type[BroadcastReader] = BroadcastReader,
        reader: LayerReader | None = None,
        device: PoolDevice | None = None,
    ) -> LayerShardedPool:
        """A pool of this rank's shard group, owned layers filled with their pattern, scratch with 0xEE."""
        ranks = next(one for one in groups or [range(self.num_ranks)] if self.rank in one)
        me = RankCoordinates(cp=list(ranks).index(self.rank))
        whole = plan(layout, ParallelSizes(cp=len(ranks)))
        owners = ShardOwners.of(layout, whole, me)
        if reader is None and self.kind == "peer":
            reader = peer(owners, communicator(ranks, timeout_s=timeout_s), timeout_s=timeout_s)
        elif reader is None:
            reader = broadcast(owners, communicator(ranks, timeout_s=timeout_s))
        if self.has_lanes and device is None:
            device = ThreadDevice(communicator)
        elif self.has_cuda and device is None:
            device = self.gpu()
        pool = LayerShardedPool(
            layout,
            whole.owned[me],
            num_pages,
            reader=reader,
            scratch_slots=scratch_slots,
            prefetch=self.prefetch,
            device=device,
        )
        self._open += [pool, reader, *([device] if device else [])]
        for name, layers in pool.owned.items():
            for layer in layers:
                region = pool.region_tensor(name, layer)
                region.copy_(torch.from_numpy(pattern(name, layer, region.shape, salt)))
        for component in layout.components:
            for buffer in pool.scratch_buffers(component.name):
                buffer.fill_(UNTOUCHED)
        return pool

    def gpu(self) -> PoolDevice:
        """This rank's GPU, as a device of its own for each pool."""
        from pdlink.memory.cuda_device import CudaDevice

        index = self.rank % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return CudaDevice(index)

    def close(self) -> None:
        for one in self._open:
            one.close()


def owns(pool: LayerShardedPool, component: str, layer: int) -> bool:
    return layer in pool.owned.get(component, ())


def whole_pages(pool: LayerShardedPool, spans: Sequence[ReadSpan]) -> list[int]:
    """Pages of which every row is read."""
    size = pool.layout.components[0].page_size
    return sorted({page for span in spans for page in span.pages[: span.num_tokens // size]})


def slots_of(span: ReadSpan, page_size: int, start: int = 0) -> np.ndarray:
    """Slots of tokens [start, num_tokens) of a span."""
    tokens = np.arange(start, span.num_tokens)
    return np.asarray(span.pages)[tokens // page_size] * page_size + tokens % page_size


def rows_of(pages: np.ndarray | torch.Tensor, layout: CacheLayout, component: str, slots: np.ndarray) -> np.ndarray:
    """The bytes of whole tokens, all fields one after the other, found the slow and plain way."""
    about, rows = layout.component(component), []
    pages = pages.cpu().numpy() if isinstance(pages, torch.Tensor) else pages
    for slot in slots:
        page, row = divmod(int(slot), about.page_size)
        parts = []
        for field in about.fields:
            for head in range(field.num_heads):
                start = field.offset + row * field.token_stride + head * field.head_stride
                parts.append(pages[page, start : start + field.bytes_per_token])
        rows.append(np.concatenate(parts))
    return np.stack(rows) if rows else np.empty((0, 0), np.uint8)


def chunk_fields(layout: CacheLayout, component: str, num_rows: int, salt: int) -> dict[str, torch.Tensor]:
    """New rows for every field of a component."""
    return {
        field.name: torch.from_numpy(pattern(f"{component}.{field.name}", 0, (num_rows, field.token_bytes), salt))
        for field in layout.component(component).fields
    }


def all_fields(fields: dict[str, torch.Tensor]) -> np.ndarray:
    """The rows of `chunk_fields` as `rows_of` gives them."""
    return np.concatenate([rows.numpy() for rows in fields.values()], axis=1)


def failure_of(call: Callable[[], object], within_s: float) -> PdlinkError:
    """The error that `call` raises, which must come in bounded time."""
    started = time.monotonic()
    with pytest.raises(PdlinkError) as caught:
        call()
    assert time.monotonic() - started < within_s, f"took {time.monotonic() - started:.1f} s: {caught.value}"
    return caught.value
