"""Owns memory that other processes of this host may map: uint8 tensors over shared memory, or over a device's.

It shapes nothing.

Engines that let pdlink read their pools in place allocate them here; memory from elsewhere is refused by the `ipc`
backend, because no other process can see it, and by a sidecar.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import torch

from pdlink.backends.shm import Segment
from pdlink.errors import InvalidInput, StateError

if TYPE_CHECKING:
    from pdlink.memory.cuda_blocks import CudaSharedBlock


class Allocation:
    """`nbytes` bytes of zero-filled host memory in one segment.

    Memory rules: whoever holds `tensor`, or a view of it, may write at any time, as far as no publication says
    otherwise. `close` removes the segment's name; the memory itself lives until the last tensor over it is gone.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.nbytes = segment.nbytes
        self.address = segment.address
        self.name = segment.name
        self._tensor: torch.Tensor | None = torch.from_numpy(segment.array)

    @property
    def tensor(self) -> torch.Tensor:
        """uint8 [nbytes] over the memory itself. Raises `StateError` once closed."""
        if self._tensor is None:
            raise StateError(f"allocation {self.name} is closed")
        return self._tensor

    def close(self) -> None:
        """Give the memory back; twice is fine."""
        self._tensor = None
        self._segment.close()


@overload
def allocate(nbytes: int) -> Allocation: ...
@overload
def allocate(nbytes: int, device: int) -> CudaSharedBlock: ...
def allocate(nbytes: int, device: int | None = None) -> Allocation | CudaSharedBlock:
    """`nbytes` bytes that peers on this host can map; with `device`, of that CUDA device, for a pool beside a sidecar.

    A pool on a device whose pages peers read in place, by the `ipc` backend of a `Node` in this process, is of
    cudaMalloc instead (`pdlink.memory.cuda_blocks.CudaBlock`), a block for each tensor; a sidecar maps those as well.

    Raises `InvalidInput` below 1 byte, and `BackendUnavailable` when /dev/shm or the device has not enough room, or
    where the device cannot be used.
    """
    if device is None:
        return Allocation(Segment.create(nbytes))
    if nbytes < 1:
        raise InvalidInput(f"nbytes={nbytes}: allocate at least 1 byte")
    from pdlink.memory.cuda_blocks import CudaSharedBlock

    return CudaSharedBlock(nbytes, device)
