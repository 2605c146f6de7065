"""Owns scenarios of broadcasts in a layer order that all ranks gave at the begin: one exchange a forward, no more."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from pdlink.errors import DeadlineExceeded, IntegrityError, PdlinkError
from pdlink.memory.forward import LayerKey, ReadSpan
from pdlink.memory.lockstep import RECORD_NBYTES
from pdlink.memory.sharded_pool import LayerShardedPool
from tests.memory.rank_world import PAGE, World, dsa_layout, failure_of, owns, pattern, rows_of, slots_of
from tests.memory.scenarios_bytes import check_layer, refill_scratch
from tests.memory.scenarios_divergence import NoBroadcast, OneRankHearsNothing, Replay

SPAN = ReadSpan([9, 2, 5], 140)
LAYERS = 6
# Far below the 20 s that a pool of these scenarios waits for a rank: nobody heard of it by a time limit.
SOON_S = 30.0


def read_all(pool: LayerShardedPool, keys: list[LayerKey]) -> None:
    """A forward that gives `keys` as its order and keeps to it."""
    pool.begin_forward([SPAN], keys)
    for component, layer in keys:
        refill_scratch(pool)
        check_layer(pool, component, layer, SPAN)
    pool.end_forward()


def ordered_reads_have_one_exchange(world: World) -> None:
    pool = world.pool(dsa_layout(LAYERS))
    keys = list(pool.layout.cells())
    for order in (keys, keys[::-1], sorted(keys, key=lambda key: (key[1], key[0]))):
        before = pool.stats
        read_all(pool, order)
        assert pool.stats.fetches - before.fetches == len(keys)
        # One at the begin and one at the end, whatever the number of layers.
        assert pool.stats.nbytes_agreed - before.nbytes_agreed == 2 * world.num_ranks * RECORD_NBYTES


def an_order_can_be_left_by_all(world: World) -> None:
    """Another layer than the next, a layer read again, an end before the last layer: right, and slower."""
    pool = world.pool(dsa_layout(LAYERS))
    keys = list(pool.layout.cells())
    for reads in ([keys[0], keys[4], keys[1], keys[0]], [keys[3]], [], keys[:2]):
        pool.begin_forward([SPAN], keys)
        for component, layer in reads:
            refill_scratch(pool)
            check_layer(pool, component, layer, SPAN)
        pool.end_forward()
    read_all(pool, keys)


def rows_changed_on_the_way_are_read(world: World) -> None:
    pool = world.pool(dsa_layout(LAYERS))
    layout, keys = pool.layout, [("latent", layer) for layer in range(LAYERS)]
    expected = pattern("latent", 3, (16, layout.component("latent").page_bytes))
    data = pattern("latent", 3, (2, layout.component("latent").page_bytes), salt=7)
    pool.begin_forward([SPAN], keys)
    pool.read("latent", 0)
    pool.restore("latent", 3, [2, 11], torch.from_numpy(data) if owns(pool, "latent", 3) else None)
    expected[[2, 11]] = data
    live = np.concatenate([slots_of(SPAN, PAGE), np.arange(11 * PAGE, 12 * PAGE)])
    for layer in range(1, LAYERS):
        came = rows_of(pool.read("latent", layer), layout, "latent", live if layer == 3 else slots_of(SPAN, PAGE))
        if layer == 3:
            assert np.array_equal(came, rows_of(expected, layout, "latent", live))
    pool.end_forward()


def all_fail(pool: LayerShardedPool, run: Callable[[], object], words: str = "") -> PdlinkError:
    """`run` fails soon, its forward is over, and the next one is right on a group of its own."""
    error = failure_of(run, SOON_S)
    assert isinstance(error, IntegrityError | DeadlineExceeded)
    assert words in str(error), error
    if pool._remote.forward is not None:
        with pytest.raises(IntegrityError):
            pool.end_forward()
    return error


def one_rank_that_leaves_the_order_is_named(world: World) -> None:
    """It skips a layer, swaps two, reads one of another size, or ends early; whether it owns the next layer or not."""
    pool = world.pool(dsa_layout(LAYERS))
    keys = list(pool.layout.cells())
    ways = [
        keys[:2] + keys[3:],
        keys[:-1],
        [*keys[:4], keys[5], keys[4], *keys[6:]],
        [keys[-1], *keys],
        keys[:3],
    ]
    for odd in (1, 0):
        for reads in ways:

            def run(reads: list[LayerKey] = reads, odd: int = odd) -> None:
                pool.begin_forward([SPAN], keys)
                for key in reads if world.rank == odd else keys:
                    pool.read(*key)
                pool.end_forward()

            all_fail(pool, run, f"shard rank {odd} (global rank {odd})")
        read_all(pool, keys)


def a_change_on_one_rank_alone_stops_all(world: World) -> None:
    pool = world.pool(dsa_layout(LAYERS))
    keys = list(pool.layout.cells())

    def run() -> None:
        pool.begin_forward([SPAN], keys)
        pool.read(*keys[0])
        if world.rank == 1:
            pool.move("latent", torch.tensor([9 * PAGE]), torch.tensor([2 * PAGE]))
        for key in keys[1:]:
            pool.read(*key)
        pool.end_forward()

    all_fail(pool, run)


def broadcasts_that_move_nothing_stop_all(world: World) -> None:
    """Ranks that got nothing find it at the read; those that did, at the latest at the end."""
    for communicator in (NoBroadcast, OneRankHearsNothing, Replay):
        pool = world.pool(dsa_layout(LAYERS), communicator=communicator)
        keys = [("latent", layer) for layer in range(LAYERS)]

        def run(pool: LayerShardedPool = pool, keys: list[LayerKey] = keys) -> None:
            pool.begin_forward([SPAN], keys)
            for key in keys:
                pool.read(*key)
            pool.end_forward()

        all_fail(pool, run)


SCENARIOS: dict[str, Callable[[World], None]] = {
    one.__name__: one
    for one in (
        ordered_reads_have_one_exchange,
        an_order_can_be_left_by_all,
        rows_changed_on_the_way_are_read,
        one_rank_that_leaves_the_order_is_named,
        a_change_on_one_rank_alone_stops_all,
        broadcasts_that_move_nothing_stop_all,
    )
}
