"""Owns what the driver, and PyTorch, say of an address of device memory: who made it, and how it can be shared. It
decides nothing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from pdlink.backends import cuda_driver
from pdlink.errors import BackendError


@dataclass(frozen=True, slots=True)
class PointerFacts:
    """Of an allocation at [start, stop) of a device.

    `has_ipc_handle`: CUDA IPC can share it, so that cudaMalloc made it. `is_vmm`: it was mapped by handle (cuMemMap).
    `is_expandable`: by PyTorch, as an expandable segment. `is_pooled`: cudaMallocAsync made it. `is_managed`: it is of
    unified memory, which may lie on the host.
    """

    start: int
    stop: int
    has_ipc_handle: bool = False
    is_vmm: bool = False
    is_expandable: bool = False
    is_pooled: bool = False
    is_managed: bool = False


def look_at(address: int, device: int) -> PointerFacts:
    """Raises `RegionError` where `address` is no memory of `device`."""
    found = cuda_driver.find_allocation(address, device)
    with cuda_driver.on_device(device):
        is_vmm = _is_vmm(address)
        return PointerFacts(
            found.start,
            found.stop,
            has_ipc_handle=bool(_attribute("IS_LEGACY_CUDA_IPC_CAPABLE", address)),
            is_vmm=is_vmm,
            is_expandable=is_vmm and _is_expandable(address),
            is_pooled=bool(_attribute("MEMPOOL_HANDLE", address)),
            is_managed=bool(_attribute("IS_MANAGED", address)),
        )


def _attribute(name: str, address: int) -> int:
    """0 where the driver has none, which an older one says by an error."""
    kind = cuda_driver.constant("CUpointer_attribute", f"CU_POINTER_ATTRIBUTE_{name}")
    try:
        found = cuda_driver.call("cuPointerGetAttribute", kind, address)
    except BackendError:
        return 0
    return int(found or 0)


def _is_vmm(address: int) -> bool:
    try:
        handle = cuda_driver.call("cuMemRetainAllocationHandle", address)
    except BackendError:
        return False
    cuda_driver.call("cuMemRelease", handle)
    return True


def _is_expandable(address: int) -> bool:
    """Whether PyTorch, where this process uses it, has `address` in an expandable segment."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    return any(
        bool(one.get("is_expandable")) and one["address"] <= address < one["address"] + one["total_size"]
        for one in torch.cuda.memory_snapshot()
    )
