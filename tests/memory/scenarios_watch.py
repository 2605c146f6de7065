"""Owns the scenario of what a watched pool tells of its reads, over the reader that brings them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdlink.events import Events
from pdlink.memory.broadcast_reader import BroadcastReader
from pdlink.memory.forward import ReadSpan
from pdlink.memory.peer_reader import PeerReader
from pdlink.observability.metrics import Metrics
from pdlink.observability.pool_watch import PoolWatch, timed
from tests.memory.rank_world import PAGE, World, dsa_layout


def a_watched_pool_counts_reads_hits_and_the_time_of_each_fetch(world: World) -> None:
    layout, events = dsa_layout(6), Events()
    value = Metrics(events).registry.get_sample_value

    def watched(kind: type[BroadcastReader] | type[PeerReader]) -> Any:
        return lambda *told, **more: timed(kind(*told, **more), events)

    pool = world.pool(layout, peer=watched(PeerReader), broadcast=watched(BroadcastReader))
    watch = PoolWatch(pool, events)
    for _ in range(2):
        pool.begin_forward([ReadSpan([9, 2], PAGE + 3)])
        for component, layer in layout.cells():
            for _ in range(2):
                pool.read(component, layer)
        pool.end_forward()
        watch.tell()
    stats = pool.stats
    assert stats.fetches > 0
    assert value("pdlink_layer_fetch_seconds_count", {"reader": world.kind}) == stats.fetches
    assert value("pdlink_scratch_hits_total") == stats.scratch_hits > 0
    assert value("pdlink_layer_reads_total") == stats.reads == 4 * len(list(layout.cells()))
    assert value("pdlink_layer_fetch_bytes_total") == stats.nbytes_moved > 0


SCENARIOS: dict[str, Callable[[World], None]] = {
    one.__name__: one for one in (a_watched_pool_counts_reads_hits_and_the_time_of_each_fetch,)
}
