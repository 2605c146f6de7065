"""Owns what a layer-sharded pool counts of its reads, as one value. It counts nothing itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counts since the pool was made.

    `reads` are calls, of which `scratch_hits` found the layer in scratch and `fetches` moved it; the rest were of
    layers that need no fetch here. Bytes are counted where they move: `nbytes_moved` are live rows (broadcast: live
    pages and their trailers), `nbytes_last_fetch` those of the latest fetch, `nbytes_agreed` the records exchanged.
    """

    reads: int = 0
    scratch_hits: int = 0
    fetches: int = 0
    nbytes_moved: int = 0
    nbytes_last_fetch: int = 0
    nbytes_agreed: int = 0
