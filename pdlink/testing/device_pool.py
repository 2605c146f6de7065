"""Owns pattern pools in device memory: the pages and checks of `pattern`, over tensors. Bytes are compared on the host.

Loading this module loads torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from pdlink.layout.components import CacheLayout
from pdlink.layout.layer_plan import OwnedLayers
from pdlink.layout.regions import MemoryKind
from pdlink.memory.pool_device import DeviceMemory
from pdlink.testing.pattern import SENTINEL, Bytes, PatternPool


class DevicePool(PatternPool):
    """A `PatternPool` whose cells are uint8 tensors on `device`, one each.

    `view` and `heads` return read-only copies on the host; `fill` and `wipe` are what writes, and the bytes are there
    when they return. A cell begins somewhere inside an allocation of torch's, as the tensors of an engine do, or lies
    in a block that `take` (bytes -> block) has made for it.
    """

    def __init__(
        self,
        layout: CacheLayout,
        owned: OwnedLayers,
        num_pages: int,
        device: torch.device,
        *,
        page_gap: int = 0,
        sparse: bool = False,
        take: Callable[[int], DeviceMemory] | None = None,
    ) -> None:
        self._where = device
        self._take = take
        self._blocks: list[DeviceMemory] = []
        self._tensors: dict[tuple[str, int], torch.Tensor] = {}
        self.memory = MemoryKind.CUDA if device.type == "cuda" else MemoryKind.HOST
        self.device = device.index or 0
        super().__init__(layout, owned, num_pages, page_gap=page_gap, sparse=sparse)

    def view(self, component: str, layer: int) -> Bytes:
        """uint8 [num_pages, page_bytes], read-only: a copy of the pages as they are now."""
        return _on_host(self._pages(component, layer))

    def heads(self, component: str, layer: int, nbytes: int) -> Bytes:
        return _on_host(self._pages(component, layer)[:, :nbytes])

    def wipe(self) -> None:
        for component, layer in self._tensors:
            self._pages(component, layer).fill_(SENTINEL)
        self._synchronize()

    def close(self) -> None:
        """Give the memory back to the device, as far as torch's allocator can."""
        self._tensors.clear()
        for one in self._blocks:
            one.close()
        if self._where.type == "cuda":
            torch.cuda.empty_cache()

    def _hold(self, name: str, layer: int, nbytes: int, shape: tuple[int, int], stride: int) -> int:
        block = self._tensor(nbytes)
        rows = block.as_strided(shape, (stride, 1))
        rows.fill_(SENTINEL)
        self._synchronize()
        self._tensors[name, layer] = rows
        return block.data_ptr()

    def _tensor(self, nbytes: int) -> torch.Tensor:
        if self._take is None:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._where)
        self._blocks.append(self._take(nbytes))
        return self._blocks[-1].tensor

    def _rows(self, component: str, layer: int) -> Bytes:
        return _on_host(self._tensors[component, layer])

    def _put(self, component: str, layer: int, pages: Sequence[int], data: Bytes) -> None:
        index = torch.tensor(list(pages), dtype=torch.int64, device=self._where)
        self._pages(component, layer)[index] = torch.from_numpy(np.ascontiguousarray(data)).to(self._where)
        self._synchronize()

    def _pages(self, component: str, layer: int) -> torch.Tensor:
        """uint8 [num_pages, page_bytes] on the device, the memory itself."""
        rows = self._tensors[component, layer]
        return rows[self._guards : self._guards + self.num_pages, : self._page_bytes(component)]

    def _synchronize(self) -> None:
        """Backends use streams of their own, which do not wait for the one that was just written on."""
        if self._where.type == "cuda":
            torch.cuda.synchronize(self._where)


def _on_host(tensor: torch.Tensor) -> Bytes:
    copied: Bytes = tensor.to("cpu", copy=True).numpy()
    copied.setflags(write=False)
    return copied
