"""Owns the pools of tests of sidecars on GPUs: rigs whose engines have their pages in device memory of one form."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdlink.testing.device_pool import DevicePool
from tests.sidecar.rig import NUM_PAGES, Rig, make_layout

FORMS = ("descriptor", "handle", "tensor")
"""How a pool is shared: `pdlink.memory.allocate`, a block of cudaMalloc, and a tensor of PyTorch's that has one."""
SLOT_BYTES = 1 << 20
TENSOR_BYTES = 12 << 20


def take(form: str, device: int) -> Callable[[int], Any] | None:
    """Memory of a form, of `device`."""
    from pdlink.memory.allocate import allocate
    from pdlink.memory.cuda_blocks import CudaBlock

    if form == "descriptor":
        return lambda nbytes: allocate(nbytes, device)
    return (lambda nbytes: CudaBlock(nbytes, device)) if form == "handle" else None


def make_device_pool(form: str, device: int = 0) -> DevicePool:
    """Without guard pages where the block is shared whole, since those would be memory of others."""
    import torch

    layout = make_layout()
    pages = NUM_PAGES
    if form == "tensor":  # such that PyTorch's allocator asks for a block for each cell
        pages = TENSOR_BYTES // min(one.page_bytes for one in layout.components)
    owned = {one.name: one.layers for one in layout.components}
    where = torch.device("cuda", device)
    return DevicePool(layout, owned, pages, where, sparse=form != "descriptor", take=take(form, device))


class DeviceRig(Rig):
    """Engines have their pools on a device, in one form."""

    def __init__(
        self, stack: contextlib.ExitStack, folder: Path, backend: str, form: str, way: str = "auto", device: int = 0
    ) -> None:
        super().__init__(stack, folder, backend)
        self.form, self.way, self.device = form, way, device

    def settings(self) -> dict[str, object]:
        staging = {"way": self.way, "staging_slots": 4, "staging_device_slot_bytes": SLOT_BYTES}
        return {**super().settings(), **staging}

    def pool(self) -> DevicePool:
        pool = make_device_pool(self.form, self.device)
        self.stack.callback(pool.close)
        return pool
