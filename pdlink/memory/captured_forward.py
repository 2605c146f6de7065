"""Owns what is known of a forward in a CUDA graph: which layers it fetches, and the memory that is filled for a replay.

A graph is captured once and replayed with other pages. What differs between replays lies in device memory at fixed
addresses: the list of live pages of each page group, and the first epoch of the forward, from which all epochs in the
graph count. How a graph is captured, and what a replay has to wait for, is `remote_layers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from pdlink.errors import StateError
from pdlink.layout import CacheLayout, Component
from pdlink.memory.epochs import begin_of
from pdlink.memory.forward import LayerKey, LivePages
from pdlink.memory.page_lists import PaddedPages
from pdlink.memory.pool_device import PageList, PoolDevice

_WORD_NBYTES = 8


class CapturedForward:
    """One forward as a graph makes it, from `LayerShardedPool.prepare_capture`. One thread, that of the pool.

    It takes 8 bytes for each page of the pool and page group, in private memory of the device, which a graph reads at
    each replay: it is kept as long as the graph is replayed.
    """

    def __init__(self, layout: CacheLayout, order: Sequence[LayerKey], num_pages: int, device: PoolDevice) -> None:
        self.order = tuple(order)
        self.is_captured = False
        self._device = device
        self._fetched: list[Component] = []
        self._counts = (0, 0)
        self._base = device.scratch((_WORD_NBYTES,))
        self._memory = {group.name: device.scratch(((1 + num_pages) * _WORD_NBYTES,)) for group in layout.page_groups}
        self.pages: dict[str, LivePages] = {
            group.name: PaddedPages(group.page_size, PageList(self._memory[group.name].data_ptr(), num_pages))
            for group in layout.page_groups
        }

    @property
    def base(self) -> int:
        """The address of the int64 from which the graph's epochs count."""
        return self._base.data_ptr()

    def check_ready(self) -> None:
        """Raise `StateError` unless a graph has been captured."""
        if not self.is_captured:
            raise StateError("nothing was captured for this replay; capture a graph inside pool.capturing(...) first")

    def fetches(self, component: Component) -> None:
        """The graph that is captured fetches a layer of `component`."""
        self._fetched.append(component)

    def finish(self, reads: int, hits: int) -> None:
        """The capture is over; so many reads of layers, and reads that found them in scratch, are in the graph."""
        self._counts = (reads, hits)
        self.is_captured = True

    @property
    def counts(self) -> tuple[int, int, int]:
        """Reads, those that found the layer in scratch, and fetches of one replay."""
        return *self._counts, len(self._fetched)

    def nbytes(self, live: Mapping[str, LivePages]) -> tuple[int, int]:
        """Bytes that a replay moves: of all fetches, and of the last one."""
        each = [live[one.page_group].num_pages * one.page_bytes for one in self._fetched]
        return sum(each), each[-1] if each else 0

    def fill(self, forward: int, live: Mapping[str, LivePages]) -> None:
        """What the caller launches in COMPUTE from here on, a replay first of all, is forward `forward` with the pages
        of `live`. The replay before has been launched."""
        device = self._device
        device.fork()
        device.fill(self._base, np.array([begin_of(forward)], np.int64))
        for name, memory in self._memory.items():
            device.fill(memory, np.concatenate([[live[name].num_pages], live[name].page_ids]).astype(np.int64))
        device.join(device.mark())

    def follow(self) -> None:
        """What is launched in FETCH from here on comes after the replay."""
        self._device.fork()


def check_captured(tensor: torch.Tensor, device: torch.device | None, what: str) -> None:
    """Raise `StateError` unless `tensor`, which a graph will read at each replay, lies on the pool's device."""
    if tensor.device != device:
        raise StateError(
            f"{what} of a write or read that is captured lie on {tensor.device}, the pool on {device}: a replay would "
            "never see other values; give the tensor on the device that the graph reads, and refill it before a replay"
        )
