"""Owns the spans of memory that a set of regions covers, and the check that a pull stays inside. It moves nothing."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

import numpy as np

from pdlink.backends.mooncake_engine import Span
from pdlink.errors import RegionError
from pdlink.layout.regions import MAX_ADDRESS, Region
from pdlink.transfer.descriptors import Int64Array


class RegionSpans:
    """Registered regions, each as often as it was added. Any thread may call."""

    def __init__(self) -> None:
        self._count: Counter[Span] = Counter()
        self._lock = threading.Lock()

    def add(self, region: Region) -> None:
        with self._lock:
            self._count[region.base_address, region.end_address] += 1

    def remove(self, region: Region) -> None:
        span = (region.base_address, region.end_address)
        with self._lock:
            self._count[span] -= 1
            if self._count[span] <= 0:
                del self._count[span]

    def clear(self) -> None:
        with self._lock:
            self._count.clear()

    def merged(self) -> list[Span]:
        """In order, none overlapping another: regions of one allocation may lie inside each other's gaps."""
        with self._lock:
            spans = sorted(self._count)
        return merge(spans)


def merge(spans: Iterable[Span]) -> list[Span]:
    """`spans`, in order of their starts, with those that overlap made one. Those that only touch stay apart."""
    merged: list[Span] = []
    for start, stop in spans:
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def check_inside(
    base: Int64Array,
    stride: Int64Array,
    page_bytes: Int64Array,
    page: Int64Array,
    count: Int64Array,
    spans: list[Span],
    what: str,
) -> None:
    """Raise `RegionError` unless every page of every layer lies in one of `spans` (in order, none overlapping).

    `base`, `stride` and `page_bytes` are int64 [layers], `page` and `count` int64 [runs]. `what` begins the message.
    """
    if not len(page) or not len(base):
        return
    low, high = int(page.min()), int((page + count - 1).max())
    if low < 0 or bool(np.any(high > (MAX_ADDRESS - page_bytes - base) // np.maximum(stride, 1))):
        raise RegionError(f"{what}: pages {low}..{high} reach outside the address space")
    first, end = base + low * stride, base + high * stride + page_bytes
    edges = np.array(spans, dtype=np.int64).reshape(-1, 2)
    which = np.searchsorted(edges[:, 0], first, side="right") - 1
    inside = np.zeros(len(base), np.bool_) if not len(edges) else (which >= 0) & (end <= edges[which, 1])
    if not bool(np.all(inside)):
        row = int(np.argmin(inside))
        raise RegionError(f"{what} {int(first[row]):#x}..{int(end[row]):#x} is in no registered region")
