"""Owns a pool's memory on CUDA devices: dedicated allocations that peers map by CUDA IPC, and those mappings; blocks
that a sidecar maps by file descriptor; and tensors over all of these.

NVIDIA's driver lets memory be exported by CUDA IPC only if `cuMemAlloc` made it, which PyTorch's own allocator may not.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Generic, TypeVar

import torch

from pdlink.backends import cuda_driver
from pdlink.backends.cuda_vmm import FdBlock
from pdlink.errors import BackendError, BackendUnavailable, PeerGone, StateError

BlockT = TypeVar("BlockT", cuda_driver.DeviceBlock, FdBlock)


class _Block(Generic[BlockT]):
    """Zero-filled memory of a device, and a tensor over it."""

    def __init__(self, block: BlockT, device: int) -> None:
        self._block: BlockT = block
        self.address, self.nbytes, self.device = block.address, block.nbytes, device
        self._tensor: torch.Tensor | None = tensor_at(self.address, self.nbytes, device)
        self._tensor.zero_()
        torch.cuda.current_stream(device).synchronize()

    @property
    def tensor(self) -> torch.Tensor:
        """uint8 [nbytes] over the memory itself. Raises `StateError` once closed."""
        if self._tensor is None:
            raise StateError("the pool's device memory is closed")
        return self._tensor

    def close(self) -> None:
        """Give the memory back, whatever tensors are left: nothing may use them any more. Twice is fine."""
        if self._tensor is not None:
            self._tensor = None
            self._block.close()


class CudaBlock(_Block[cuda_driver.DeviceBlock]):
    """Memory rules as `pdlink.memory.allocate` has them, but that it ends with `close`, whatever tensors are left:
    nobody may use them, or peers' mappings, after that.
    """

    def __init__(self, nbytes: int, device: int) -> None:
        super().__init__(cuda_driver.DeviceBlock(nbytes, device), device)

    def show(self) -> dict[str, Any]:
        """How a peer maps it. Raises `RegionError` when it cannot be exported."""
        found = cuda_driver.find_allocation(self.address, self.device)
        return {
            "uuid": cuda_driver.device_uuid(self.device),
            "handle": cuda_driver.export(found).hex(),
            "offset": self.address - found.start,
            "nbytes": self.nbytes,
        }


class CudaSharedBlock(_Block[FdBlock]):
    """A block that a sidecar maps by file descriptor. Memory rules as `CudaBlock` has them, but that the memory itself
    lives until whoever has it mapped has let go, too."""

    def __init__(self, nbytes: int, device: int) -> None:
        super().__init__(FdBlock(nbytes, device), device)


class CudaMapping:
    """A peer's block as `device` reads it."""

    def __init__(self, shown: dict[str, Any], device: int) -> None:
        owner = cuda_driver.find_device(shown["uuid"])
        if owner is None:
            raise BackendUnavailable(
                f"a peer's layers are on a GPU ({shown['uuid']}) that this process does not see; let all ranks of a "
                "shard group see all its GPUs (CUDA_VISIBLE_DEVICES), or use the broadcast reader"
            )
        cuda_driver.check_reach(device, owner)
        try:
            self._start = cuda_driver.map_exported(bytes.fromhex(shown["handle"]), device)
        except BackendError as error:
            raise PeerGone(f"a peer's device memory cannot be mapped ({error}); it may have ended") from error
        self._device = device
        self._is_open = True
        self.address, self.nbytes = self._start + int(shown["offset"]), int(shown["nbytes"])

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            with suppress(BackendError):  # a device that has failed takes its mappings along
                cuda_driver.unmap(self._start, self._device)


class _Memory:
    """Device memory as torch takes it in without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def tensor_at(address: int, nbytes: int, device: int) -> torch.Tensor:
    """uint8 [nbytes] over device memory, which the caller keeps."""
    found = torch.as_tensor(_Memory(address, nbytes), device=f"cuda:{device}")
    if found.data_ptr() != address:
        raise BackendError(f"torch made a copy of device memory at {address:#x} instead of a view")
    return found
