"""Owns the measurement of a link: what one more descriptor and the bytes of a pull take.

It pulls a little from the owner's staging area into an own slot. What that brings is looked at by nobody.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np

from pdlink.decode.staged_pull import Wire
from pdlink.decode.staging_link import StagingLink
from pdlink.transfer.descriptors import GroupMove, LayerTable, PageRuns, PullBatch
from pdlink.transfer.failure import Failure
from pdlink.transfer.packing import one_range
from pdlink.transfer.ways import WireCost

MAX_ROWS = 64
LEAST_ROWS = 8
LARGE_BYTES = 4 << 20
LEAST_S = 500e-6
"""What takes less says more of the ends of a pull than of its bytes: then more is pulled, where a slot has room."""
GROWTH = 8
ROUNDS = 3
"""The quickest counts; the first one pays for what a link does once."""


def num_rows(link: StagingLink, row_bytes: int) -> int:
    """How many rows of `row_bytes` a slot has room for with gaps between them, 0 where they are too few to tell."""
    rows = min(MAX_ROWS, link.slot_bytes // (2 * row_bytes))
    return rows if rows >= LEAST_ROWS else 0


def measure(link: StagingLink, wire: Wire, worker_id: str, slot: int, row_bytes: int) -> WireCost | Failure:
    """The cost of rows of `row_bytes` over this link. `slot` is an own one that the caller holds; quiet afterwards."""
    own, source = link.arena.area, link.source
    nbytes = min(LARGE_BYTES, link.slot_bytes)
    while True:
        large_s = _quickest(wire, one_range(worker_id, source, 0, own, slot, nbytes))
        if isinstance(large_s, Failure):
            return large_s
        if large_s >= LEAST_S or nbytes == link.slot_bytes:
            break
        nbytes = min(GROWTH * nbytes, link.slot_bytes)
    rows = num_rows(link, row_bytes)
    apart_s = _quickest(wire, _apart(worker_id, source.base_address, own.address(slot), rows, row_bytes))
    if isinstance(apart_s, Failure):
        return apart_s
    bytes_per_s = nbytes / large_s
    return WireCost(max(0.0, apart_s - rows * row_bytes / bytes_per_s) / rows, bytes_per_s)


def _apart(worker_id: str, source: int, destination: int, rows: int, row_bytes: int) -> PullBatch:
    """`rows` ranges with gaps between them, so that nobody can merge them."""
    gap = 2 * row_bytes
    table = LayerTable(*(np.array([one], dtype=np.int64) for one in (0, source, gap, destination, gap, row_bytes)))
    pages = np.arange(rows, dtype=np.int64)
    return PullBatch(worker_id, (GroupMove("staging", PageRuns(pages, pages, np.ones(rows, dtype=np.int64)), table),))


def _quickest(wire: Wire, batch: PullBatch) -> float | Failure:
    seconds = []
    for _ in range(ROUNDS):
        began = perf_counter()
        failure = wire.finish(wire.start(batch))
        if failure:
            return failure
        seconds.append(perf_counter() - began)
    return max(min(seconds), 1e-9)
