"""Owns memory that other processes of this host may map: uint8 tensors over shared-memory segments. It shapes nothing.

Engines that let pdlink read their pools in place allocate them here; memory from elsewhere is refused by the `ipc`
backend, because no other process can see it.
"""

from __future__ import annotations

import torch

from pdlink.backends.shm import Segment
from pdlink.errors import StateError


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


def allocate(nbytes: int) -> Allocation:
    """`nbytes` bytes that peers on this host can map.

    Raises `InvalidInput` below 1 byte and `BackendUnavailable` when /dev/shm has not enough room.
    """
    return Allocation(Segment.create(nbytes))
