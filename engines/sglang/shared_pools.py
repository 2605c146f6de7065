"""Owns how sglang's CPU pools get memory that other processes of the host can map, so that `ipc` can read it.

sglang makes the tensors of a pool itself, before any transfer backend is asked. While `shared_pools` is entered, the
zero-filled host tensors that it makes lie in shared memory; everything else about them is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pdlink.memory.allocate import Allocation, allocate

MIN_BYTES = 4096
"""Smaller tensors are no pools: pointers, strides, flags."""

_kept: list[Allocation] = []
"""Pools live as long as their process, and so does their memory; what a process leaves, the next one removes."""


@contextmanager
def shared_pools() -> Iterator[None]:
    """Make `torch.zeros` on the CPU give shared memory, in this thread, for tensors of `MIN_BYTES` and more.

    Raises `BackendUnavailable` when /dev/shm has not enough room.
    """
    with _SharedZeros():
        yield


class _SharedZeros(TorchFunctionMode):
    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.zeros and torch.device(kwargs.get("device") or torch.get_default_device()).type == "cpu":
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            shape = tuple(args[0]) if len(args) == 1 and isinstance(args[0], Sequence) else tuple(args)
            nbytes = prod(shape) * dtype.itemsize
            if nbytes >= MIN_BYTES:
                _kept.append(allocate(nbytes))
                return _kept[-1].tensor.view(dtype).view(shape)
        return function(*args, **kwargs)
