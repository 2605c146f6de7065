"""Owns copies between host addresses of this process: what packs and unpacks staging slots. It checks no range."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from pdlink.transfer.descriptors import PullBatch

ROWS_PER_LOOK = 256


def copy(batch: PullBatch, stop: Callable[[], bool]) -> bool:
    """Copy every row of `batch`, whose addresses are mapped here; False when `stop` said so before the end.

    The caller vouches for the addresses, and that nobody writes the source meanwhile, or that it notices.
    """
    for rows in batch.expand(ROWS_PER_LOOK):
        if stop():
            return False
        columns = (rows.destination.tolist(), rows.source.tolist(), rows.nbytes.tolist())
        for destination, source, nbytes in zip(*columns, strict=True):
            ctypes.memmove(destination, source, nbytes)
    return True
