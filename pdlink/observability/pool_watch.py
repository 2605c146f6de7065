"""Owns what a sharded pool tells of its reads: their counts when somebody asks, and the time of each fetch. It reads no
layer itself.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, cast

from pdlink.events import Events

if TYPE_CHECKING:
    from pdlink.memory.layer_reader import LayerReader
    from pdlink.memory.sharded_pool import LayerShardedPool


class PoolWatch:
    """The counts of one pool. `tell` emits what was added since it was called before, as the event `pool.stats`.
    Thread-safe: several may scrape at once, and nothing is told twice."""

    def __init__(self, pool: LayerShardedPool, events: Events) -> None:
        self._pool = pool
        self._events = events
        self._told = (0, 0, 0)
        self._lock = threading.Lock()

    def tell(self) -> None:
        with self._lock:
            stats = self._pool.stats
            now = (stats.reads, stats.scratch_hits, stats.nbytes_moved)
            reads, hits, nbytes = (after - before for after, before in zip(now, self._told, strict=True))
            self._told = now
        self._events.emit("pool.stats", num_reads=reads, num_hits=hits, num_bytes=nbytes)


class _TimedReader:
    """A reader that emits `pool.fetch` (reader, took_s) with each layer that it brings; else it is the inner one."""

    def __init__(self, inner: LayerReader, events: Events) -> None:
        self._inner = inner
        self._events = events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def fetch(self, *arguments: Any) -> None:
        began = time.perf_counter()
        self._inner.fetch(*arguments)
        reader = "broadcast" if self._inner.is_collective else "peer"
        self._events.emit("pool.fetch", reader=reader, took_s=time.perf_counter() - began)


def timed(reader: LayerReader, events: Events) -> LayerReader:
    """`reader`, telling how long each fetch of a layer took. Give it to the pool in place of `reader`."""
    return cast("LayerReader", _TimedReader(reader, events))
