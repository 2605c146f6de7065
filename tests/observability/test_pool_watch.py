"""What a pool tells of its reads: counts since it was asked before, and the time of each fetch."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from pdlink.events import Event, Events
from pdlink.memory.sharded_pool import LayerShardedPool
from pdlink.observability.metrics import Metrics
from pdlink.observability.pool_watch import PoolWatch, timed
from tests.link.rig import Site, make_layout
from tests.observability.asking import Scrape


@pytest.fixture
def pool() -> Iterator[LayerShardedPool]:
    layout = make_layout(2)
    made = LayerShardedPool(layout, {one.name: one.layers for one in layout.components}, 4)
    yield made
    made.close()


class Reader:
    """A reader that notes what it is asked to fetch."""

    is_collective = False
    rank = 3

    def __init__(self) -> None:
        self.fetched: list[tuple[object, ...]] = []

    def fetch(self, *arguments: object) -> None:
        self.fetched.append(arguments)


def test_reads_are_told_once_as_what_was_added(pool: LayerShardedPool) -> None:
    events, heard = Events(), []
    events.subscribe(heard.append)
    watch = PoolWatch(pool, events)
    for num_reads in (2, 1, 0):
        for _ in range(num_reads):
            pool.read("latent", 0)
        watch.tell()
    assert heard == [Event("pool.stats", {"num_reads": n, "num_hits": 0, "num_bytes": 0}) for n in (2, 1, 0)]


def test_scrapes_at_the_same_time_count_no_read_twice(pool: LayerShardedPool) -> None:
    events = Events()
    value = Metrics(events).registry.get_sample_value
    watch, over = PoolWatch(pool, events), threading.Event()

    def scrape() -> None:
        while not over.is_set():
            watch.tell()

    scrapers = [threading.Thread(target=scrape) for _ in range(4)]
    for one in scrapers:
        one.start()
    for _ in range(2000):
        pool.read("latent", 0)
    over.set()
    for one in scrapers:
        one.join()
    watch.tell()
    assert value("pdlink_layer_reads_total") == pool.stats.reads == 2000


def test_a_pool_that_was_closed_can_be_asked(pool: LayerShardedPool, site: Site) -> None:
    node = site.node(http_bind="127.0.0.1:0")
    node.watch_pool(pool)
    pool.read("latent", 1)
    pool.close()
    assert Scrape(node.http_address).sum("pdlink_layer_reads_total") == 1


def test_a_node_counts_the_reads_of_the_pools_that_it_watches(site: Site, pool: LayerShardedPool) -> None:
    node = site.node(http_bind="127.0.0.1:0")
    node.watch_pool(pool)
    pool.read("latent", 1)
    pool.read("index_k", 1)
    for _ in range(2):
        assert Scrape(node.http_address).sum("pdlink_layer_reads_total") == 2


@pytest.mark.parametrize(("collective", "name"), [(True, "broadcast"), (False, "peer")])
def test_each_fetch_of_a_layer_is_timed_by_the_kind_of_reader(collective: bool, name: str) -> None:
    events, inner = Events(), Reader()
    inner.is_collective = collective
    metrics = Metrics(events)
    reader = timed(inner, events)
    reader.fetch(1, 2, 3, 4, 5)
    reader.fetch(1, 2, 3, 4, 6)
    assert (inner.fetched, reader.rank) == ([(1, 2, 3, 4, 5), (1, 2, 3, 4, 6)], 3)
    value = metrics.registry.get_sample_value
    assert value("pdlink_layer_fetch_seconds_count", {"reader": name}) == 2
    assert value("pdlink_layer_fetch_seconds_sum", {"reader": name}) >= 0
