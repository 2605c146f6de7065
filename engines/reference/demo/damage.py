"""Owns the damage that `--inject` does: each kind is a fault that really happened somewhere, done on purpose.

Nothing here is used without `--inject`. Each fault stays silent in the place where it is made, so that the proof at the
end of the run has to find it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from pdlink.backends.base import Backend, PullHandle
from pdlink.backends.wrapped import WrappedBackend
from pdlink.memory.sharded_pool import LayerShardedPool
from pdlink.transfer.descriptors import GroupMove, PullBatch

Change = Callable[[PullBatch], PullBatch]


class TamperedBackend(WrappedBackend):
    """Another backend that moves something else than it was asked to, and reports success."""

    def __init__(self, inner: Backend, change: Change) -> None:
        super().__init__(inner)
        self._change = change

    def submit(self, batch: PullBatch) -> PullHandle:
        return self.inner.submit(self._change(batch))


def skip_owner(worker_id: str) -> Change:
    """Move nothing of one owner: decode that pulls from some of the ranks only."""
    return lambda batch: PullBatch(batch.worker_id, ()) if batch.worker_id == worker_id else batch


def swap_layers(batch: PullBatch) -> PullBatch:
    """Land the first two layers of a component in each other's place: buffers that are paired by position."""
    return PullBatch(batch.worker_id, tuple(_swap(move) for move in batch.moves))


def _swap(move: GroupMove) -> GroupMove:
    target = move.layers.destination_base.copy()
    same = [row for row in range(1, len(target)) if move.layers.page_bytes[row] == move.layers.page_bytes[0]]
    if same:
        target[[0, same[0]]] = target[[same[0], 0]]
    return replace(move, layers=replace(move.layers, destination_base=target))


def flip_bit(pool: LayerShardedPool, page_ids: list[int]) -> None:
    """Change one bit of the last layer's first page: a link that corrupts."""
    component = pool.layout.components[0]
    pool.region_tensor(component.name, component.layers[-1])[page_ids[0], 0] ^= 1


class StaleScratchPool(LayerShardedPool):
    """A pool whose reads of other ranks' layers give what scratch held for the first one."""

    def read(self, component: str, layer: int) -> torch.Tensor:
        view = super().read(component, layer)
        if layer not in self.owned.get(component, ()):
            if not hasattr(self, "_kept"):
                self._kept: dict[str, torch.Tensor] = {}
            # What one layer left there is served to every other layer.
            view.copy_(self._kept.setdefault(component, view.clone()))
        return view
