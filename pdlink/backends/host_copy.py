"""Owns copies between host addresses of this process: what packs and unpacks staging slots. It checks no range."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterable

from pdlink.transfer.descriptors import PullBatch

ROWS_PER_LOOK = 256

_memmove = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)
"""`ctypes.memmove` without its answer, which costs a sixth of a call. Both let other threads run meanwhile."""


def copy_rows(destinations: Iterable[int], sources: Iterable[int], sizes: Iterable[int]) -> None:
    """Copy `sizes[i]` bytes from `sources[i]` to `destinations[i]`, one after another."""
    deque(map(_memmove, destinations, sources, sizes), maxlen=0)


def copy(batch: PullBatch, stop: Callable[[], bool]) -> bool:
    """Copy every row of `batch`, whose addresses are mapped here; False when `stop` said so before the end.

    The caller vouches for the addresses, and that nobody writes the source meanwhile, or that it notices.
    """
    for rows in batch.expand(ROWS_PER_LOOK):
        if stop():
            return False
        copy_rows(rows.destination.tolist(), rows.source.tolist(), rows.nbytes.tolist())
    return True
