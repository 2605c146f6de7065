"""Owns the spans of memory that a set of regions covers, none overlapping another. It registers and checks nothing."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from pdlink.backends.mooncake_engine import Span
from pdlink.layout.regions import Region


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
