"""Owns the scratch buffers of one component: bytes for a ring of layers. Others decide what goes into them."""

from __future__ import annotations

import numpy as np
import torch

from pdlink.layout import Component
from pdlink.memory.pool_device import PoolDevice
from pdlink.memory.scratch_ring import ScratchRing


class Scratch:
    """A ring of whole layers, uint8 [num_slots, num_pages, page_bytes], private to the process.

    Pages keep their positions, so page tables and kernels need no change. A rank that owns every layer of the
    component runs the ring without buffers (`reads_remotely` False), to know what the others hold.
    """

    def __init__(
        self,
        component: Component,
        num_pages: int,
        num_slots: int,
        *,
        reads_remotely: bool,
        device: PoolDevice | None = None,
    ) -> None:
        self.ring = ScratchRing(num_slots)
        self._buffers: torch.Tensor | None = None
        shape = (num_slots, num_pages, component.page_bytes)
        if reads_remotely and device is not None:
            self._buffers = device.scratch(shape)
        elif reads_remotely:
            # numpy's zeros are untouched memory: only pages that are live ever cost anything.
            self._buffers = torch.from_numpy(np.zeros(shape, dtype=np.uint8))

    @property
    def nbytes(self) -> int:
        return 0 if self._buffers is None else self._buffers.nbytes

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """uint8 [num_pages, page_bytes] of each slot; empty without buffers."""
        return () if self._buffers is None else tuple(self._buffers)

    def buffer_of(self, layer: int) -> torch.Tensor | None:
        """The buffer that holds `layer`, valid or not; None when none does."""
        slot = self.ring.slot_of(layer)
        return None if slot is None or self._buffers is None else self._buffers[slot]

    def drop(self) -> None:
        """Free the buffers and hold nothing."""
        self.ring.clear()
        self._buffers = None
