"""Owns the check that what a pull touches lies inside registered or mapped memory. Every backend asks before a byte
moves.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pdlink.errors import RegionError
from pdlink.layout.regions import MAX_ADDRESS
from pdlink.transfer.descriptors import GroupMove, Int64Array, LayerTable
from pdlink.transfer.kept import Kept

MAX_KNOWN = 64
"""Layer tables of a link of which it is remembered what was found: its requests share a few."""


class RangeCheck:
    """The check of the moves of one link. Layers that come again are looked at once, as long as the memory of both
    sides is told by the same arrays, which nobody may write to. Threads may share it.
    """

    def __init__(self) -> None:
        self._known: Kept[LayerTable, tuple[Int64Array, Int64Array, int, int]] = Kept(MAX_KNOWN)
        """Both sides' spans, and how many pages of every layer, from 0 on, lie in them."""

    def check(self, move: GroupMove, sources: Int64Array, worker_id: str, destinations: Int64Array) -> None:
        """Raise `RegionError` unless every page lies in one of `sources`, the worker's spans, and goes to one of
        `destinations`."""
        layers = move.layers
        known = self._known.get(layers)
        if known is None or known[0] is not sources or known[1] is not destinations:
            _, readable = pages_inside(layers.source_base, layers.source_stride, layers.page_bytes, sources)
            to = (layers.destination_base, layers.destination_stride, layers.page_bytes)
            known = self._known.put(layers, (sources, destinations, readable, pages_inside(*to, destinations)[1]))
        if not move.runs.lie_within(known[2], known[3]):
            check_destinations(move, destinations)
            check_sources(move, sources, worker_id)


def as_spans(pairs: Iterable[tuple[int, int]]) -> Int64Array:
    """int64 [n, 2] of (first, past-the-end) addresses, in order."""
    return np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)


def check_destinations(move: GroupMove, spans: Int64Array) -> None:
    """Raise `RegionError` unless every destination page of every layer lies in one of `spans`."""
    layers = move.layers
    first, end = extent(
        layers.destination_base, layers.destination_stride, layers.page_bytes, move.runs.destination, move.runs.count
    )
    row = first_outside(layers.destination_base, first, end, spans)
    if row is not None:
        raise RegionError(f"destination {int(first[row]):#x}..{int(end[row]):#x} is in no registered region")


def check_sources(move: GroupMove, spans: Int64Array, worker_id: str) -> None:
    """Raise `RegionError` unless every source page of every layer lies in one of `spans`, which are the worker's."""
    layers = move.layers
    first, end = extent(layers.source_base, layers.source_stride, layers.page_bytes, move.runs.source, move.runs.count)
    row = first_outside(layers.source_base, first, end, spans)
    if row is not None:
        raise RegionError(
            f"addresses {int(first[row]):#x}..{int(end[row]):#x} are in no region that {worker_id} has registered"
        )


def pages_inside(base: Int64Array, stride: Int64Array, page_bytes: Int64Array, spans: Int64Array) -> tuple[int, int]:
    """(first, past-the-last) page that lies in the span of its base in every layer; nothing lies in an empty range."""
    if not len(base) or not len(spans):
        return 0, 0
    which = np.searchsorted(spans[:, 0], base, side="right") - 1
    if bool(np.any(which < 0)) or bool(np.any(base >= spans[which, 1])):
        return 0, 0
    return 0, int(((spans[which, 1] - base - page_bytes) // np.maximum(stride, 1)).min()) + 1


def first_outside(base: Int64Array, first: Int64Array, end: Int64Array, spans: Int64Array) -> int | None:
    """The first row whose [first, end) does not lie in the span that its base lies in."""
    if not len(base):
        return None
    if not len(spans):
        return 0
    which = np.searchsorted(spans[:, 0], base, side="right") - 1
    inside = (which >= 0) & (first >= spans[which, 0]) & (end <= spans[which, 1])
    return None if bool(np.all(inside)) else int(np.argmin(inside))


def extent(
    base: Int64Array, stride: Int64Array, page_bytes: Int64Array, page: Int64Array, count: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """First and past-the-end address that the pages touch, per layer. Raises `RegionError` where that wraps."""
    if not len(page):
        return base, base
    low, high = int(page.min()), int((page + count - 1).max())
    if low < 0 or bool(np.any(high > (MAX_ADDRESS - page_bytes - base) // np.maximum(stride, 1))):
        raise RegionError(f"pages {low}..{high} reach outside the address space")
    return base + low * stride, base + high * stride + page_bytes
