"""Owns the memory of the layers of one rank: blocks that peers map, tensors over them, and their regions. No reads."""

from __future__ import annotations

import torch

from pdlink.errors import LayoutError, StateError
from pdlink.layout import CacheLayout, OwnedLayers, Region
from pdlink.layout.regions import MemoryKind
from pdlink.memory.allocate import Allocation, allocate
from pdlink.memory.forward import LayerKey
from pdlink.memory.pool_device import DeviceMemory, PoolDevice


class OwnedRegions:
    """Owned layers at full size, `num_pages` pages each, zero-filled; nothing for others.

    The layers of a component share one block, of shared memory or of `device`. Raises `LayoutError` for layers that
    the layout lacks and `BackendUnavailable` when memory runs out, with nothing left behind.
    """

    def __init__(
        self, layout: CacheLayout, owned: OwnedLayers, num_pages: int, device: PoolDevice | None = None
    ) -> None:
        self.num_pages = num_pages
        self.device = device
        self._allocations: list[Allocation | DeviceMemory] = []
        self._tensors: dict[LayerKey, torch.Tensor] = {}
        self._regions: list[Region] = []
        for name, layers in owned.items():
            strange = sorted(set(layers) - set(layout.component(name).layers))
            if strange or len(set(layers)) != len(layers):
                raise LayoutError(f"owned layers {list(layers)} of {name!r} are not distinct layers of the layout")
        try:
            for name, layers in owned.items():
                if layers:
                    self._allocate(layout, name, layers, num_pages)
        except BaseException:
            self.close()
            raise
        self.nbytes = sum(one.nbytes for one in self._allocations)
        self._closed = False

    def __contains__(self, key: LayerKey) -> bool:
        return key in self._tensors

    def tensor(self, key: LayerKey) -> torch.Tensor:
        """uint8 [num_pages, page_bytes] over the owned memory. Raises `LayoutError` when not owned."""
        if self._closed:
            raise StateError("the pool is closed")
        try:
            return self._tensors[key]
        except KeyError:
            raise LayoutError(f"this rank does not own {key[0]!r} layer {key[1]}") from None

    def regions(self) -> tuple[Region, ...]:
        """One region for every owned layer, for registration with a transport."""
        return tuple(self._regions)

    @property
    def blocks(self) -> tuple[Allocation | DeviceMemory, ...]:
        """What the regions lie in."""
        return tuple(self._allocations)

    def close(self) -> None:
        """Give the memory back; tensors that are still held keep theirs. Twice is fine."""
        self._closed = True
        self._tensors.clear()
        self._regions.clear()
        for one in self._allocations:
            one.close()

    def _allocate(self, layout: CacheLayout, name: str, layers: tuple[int, ...], num_pages: int) -> None:
        page_bytes = layout.component(name).page_bytes
        region_nbytes = num_pages * page_bytes
        nbytes = region_nbytes * len(layers)
        allocation = allocate(nbytes) if self.device is None else self.device.allocate(nbytes)
        kind, device = (MemoryKind.HOST, 0) if self.device is None else (self.device.memory, self.device.index)
        self._allocations.append(allocation)
        stacked = allocation.tensor.view(len(layers), num_pages, page_bytes)
        for index, layer in enumerate(layers):
            self._tensors[name, layer] = stacked[index]
            address = allocation.address + index * region_nbytes
            self._regions.append(Region(name, layer, address, page_bytes, page_bytes, num_pages, kind, device))
