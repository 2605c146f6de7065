"""Owns what one prefill rank shows at `/metrics`: the reads of its pool, which stay between the ranks, so that
neither a sidecar nor a front knows of them. What the link counts is not shown here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from aiohttp import web

from pdlink.events import Events
from pdlink.memory.layer_reader import LayerReader
from pdlink.memory.sharded_pool import LayerShardedPool
from pdlink.observability.metrics import Families, Metrics
from pdlink.observability.pool_watch import PoolWatch, timed

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

FAMILIES = ("pdlink_layer_reads", "pdlink_scratch_hits", "pdlink_layer_fetch_bytes", "pdlink_layer_fetch_seconds")
"""Of pdlink's table: the others would be shown as zeros that nobody counts here."""


class PoolMetrics:
    """The counts of the pools that one process has had. Scrapes may come from any thread."""

    def __init__(self) -> None:
        self._events = Events()
        self._metrics = Metrics(self._events)
        self._pools: list[PoolWatch] = []

    def watch_reader(self, reader: LayerReader | None) -> LayerReader | None:
        """`reader`, with each fetch of a layer timed; it goes into the pool."""
        return reader if reader is None else timed(reader, self._events)

    def watch_pool(self, pool: LayerShardedPool) -> None:
        """Count what `pool` reads. It may be closed while it is counted."""
        self._pools.append(PoolWatch(pool, self._events))

    def render(self, accept: str) -> tuple[bytes, str]:
        """The metrics in the format that a scraper accepts, and its content type."""
        for pool in self._pools:
            pool.tell()
        return self._metrics.render(accept, _OfPool)

    async def handle(self, request: web.Request) -> web.Response:
        """Answers `GET /metrics`."""
        text, kind = self.render(request.headers.get("Accept", ""))
        return web.Response(body=text, headers={"Content-Type": kind})


class _OfPool:
    """The families of `FAMILIES` among those of `inner`."""

    def __init__(self, inner: Families) -> None:
        self._inner = inner

    def collect(self) -> Iterable[Family]:
        return self._chosen()

    def _chosen(self) -> Iterator[Family]:
        return (one for one in self._inner.collect() if one.name in FAMILIES)
