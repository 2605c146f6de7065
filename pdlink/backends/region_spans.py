"""Owns which address ranges are registered, by the memory that they lie in. It registers nothing anywhere."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pdlink.backends.ranges import as_spans
from pdlink.layout.regions import MemoryKind, Region
from pdlink.transfer.descriptors import Int64Array


@dataclass(frozen=True, slots=True)
class Place:
    """One kind of memory, on one device where it is a device's."""

    memory: MemoryKind
    device: int = 0

    def __str__(self) -> str:
        return f"device {self.device}" if self.memory is MemoryKind.CUDA else "host memory"


Span = tuple[int, int]
"""First address, and the one past the end."""
Range = tuple[Place, int, int]
"""Where it lies, its first address, and the one past its end."""


class PlacedSpans:
    """Ranges, each as often as it was added. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[Range] = Counter()
        self._made: dict[Place, Int64Array] = {}
        """Ranges in order, made when they are asked for."""
        self._merged: Int64Array | None = None
        self._places: list[Place] | None = None
        self._lock = threading.Lock()

    def add(self, region: Region) -> None:
        with self._lock:
            self._counts[_key(region)] += 1
            self._forget()

    def remove(self, region: Region) -> None:
        """Take one back; unknown ones are ignored."""
        with self._lock:
            key = _key(region)
            self._counts[key] -= 1
            if self._counts[key] <= 0:
                del self._counts[key]
            self._forget()

    def clear(self) -> None:
        with self._lock:
            self._counts.clear()
            self._forget()

    def all(self, memory: MemoryKind) -> list[Range]:
        """Every range in that kind of memory, on whatever device, as they were added."""
        with self._lock:
            return [key for key in self._counts if key[0].memory is memory]

    def merged(self, memory: MemoryKind | None = None) -> list[Span]:
        """Ranges in order, none overlapping another: regions of one allocation may lie inside each other's gaps.

        Those in one kind of memory, or all.
        """
        with self._lock:
            return merge(sorted((start, stop) for place, start, stop in self._counts if memory in (None, place.memory)))

    def merged_array(self) -> Int64Array:
        """All of `merged` as int64 [n, 2]."""
        merged = self._merged
        if merged is None:
            with self._lock:
                ranges = sorted((start, stop) for _, start, stop in self._counts)
                merged = self._merged = as_spans(merge(ranges))
        return merged

    def devices(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(sorted({place.device for place, _, _ in self._counts if place.memory is MemoryKind.CUDA}))

    def of(self, place: Place) -> Int64Array:
        """int64 [n, 2] of (first, past-the-end), in order."""
        with self._lock:
            if place not in self._made:
                self._made[place] = as_spans((start, stop) for where, start, stop in self._counts if where == place)
            return self._made[place]

    def place(self, base: Int64Array) -> Place:
        """Where the first of these addresses lies. What lies nowhere counts as host memory; the check finds it."""
        with self._lock:
            if self._places is None:
                self._places = sorted({place for place, _, _ in self._counts}, key=str)
            places = self._places
        if not len(base) or len(places) < 2:
            return places[0] if places else Place(MemoryKind.HOST)
        for place in places:
            spans = self.of(place)
            at = int(np.searchsorted(spans[:, 0], base[0], side="right")) - 1
            if at >= 0 and base[0] < spans[at, 1]:
                return place
        return Place(MemoryKind.HOST)

    def _forget(self) -> None:
        self._made.clear()
        self._merged = self._places = None


def merge(spans: Iterable[Span]) -> list[Span]:
    """`spans`, in order of their starts, with those that overlap made one. Those that only touch stay apart."""
    merged: list[Span] = []
    for start, stop in spans:
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _key(region: Region) -> Range:
    device = region.device if region.memory is MemoryKind.CUDA else 0
    return Place(region.memory, device), region.base_address, region.end_address
