"""Owns scenarios of ranks that gather from each other's memory: who waits for whom, who does not, who is named."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pdlink.errors import DeadlineExceeded, IntegrityError, LayoutError, PdlinkError, PeerGone, StateError
from pdlink.memory.forward import ReadSpan
from pdlink.memory.peer_reader import PeerReader
from pdlink.memory.sharded_pool import LayerShardedPool
from tests.memory.rank_world import (
    PAGE,
    World,
    all_fields,
    chunk_fields,
    dsa_layout,
    failure_of,
    gqa_layout,
    pattern,
    rows_of,
    slots_of,
)
from tests.memory.scenarios_bytes import check_layer, put_rows, refill_scratch

SPAN = ReadSpan([9, 2, 5], 140)
LAYERS = 6
SOON_S = 30.0
DELAY_S = 0.05


def ranks_read_what_they_like(world: World) -> None:
    """Orders of their own, layers left out, in two shard groups that interleave."""
    groups = [[0, 2], [3, 1]] if world.num_ranks == 4 else [list(range(world.num_ranks))]
    salt = next(index for index, one in enumerate(groups) if world.rank in one)
    for layout in (dsa_layout(LAYERS), gqa_layout(5)):
        pool = world.pool(layout, groups=groups, salt=salt)
        span = ReadSpan([9, 2, 5], 2 * layout.components[0].page_size + 3)
        random = np.random.default_rng([5, world.rank])
        keys = list(layout.cells())
        for _ in range(4):
            pool.begin_forward([span])
            for index in random.permutation(len(keys))[: int(random.integers(0, len(keys) + 1))]:
                component, layer = keys[index]
                about = layout.component(component)
                came = rows_of(pool.read(component, layer), layout, component, slots_of(span, about.page_size))
                want = pattern(component, layer, (pool.num_pages, about.page_bytes), salt)
                assert np.array_equal(came, rows_of(want, layout, component, slots_of(span, about.page_size)))
            pool.end_forward()


def an_empty_batch_on_one_rank_is_fine(world: World) -> None:
    pool = world.pool(dsa_layout(LAYERS))
    pool.begin_forward([] if world.rank == 1 else [SPAN])
    for component, layer in pool.layout.cells():
        if world.rank != 1:
            refill_scratch(pool)
            check_layer(pool, component, layer, SPAN)
    pool.end_forward()


def a_rank_without_work_holds_nobody_up(world: World) -> None:
    """Rank 1 has gone through its three forwards before the others begin the first, and is not heard of meanwhile."""
    pool = world.pool(dsa_layout(LAYERS), timeout_s=20.0)
    if world.rank == 1:
        for _ in range(3):
            pool.skip_forward()
        dist.barrier()
    else:
        dist.barrier()
        for _ in range(3):
            pool.begin_forward([SPAN])
            for component, layer in pool.layout.cells():
                refill_scratch(pool)
                check_layer(pool, component, layer, SPAN)
                # Owners wait for readers here, and rank 1 reads nothing.
                pool.wait_for_readers()
            pool.move("latent", torch.tensor([9 * PAGE]), torch.tensor([9 * PAGE]))
            pool.read("latent", 5)
            pool.end_forward()
    dist.barrier()
    pool.begin_forward([SPAN])
    refill_scratch(pool)
    check_layer(pool, "latent", 5, SPAN)
    with pytest.raises(StateError):
        pool.skip_forward()
    pool.end_forward()


class SlowReader(PeerReader):
    """Ranks other than 0 gather late."""

    def fetch(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(DELAY_S)
        super().fetch(*args, **kwargs)


def rows_of_layer(pool: LayerShardedPool, component: str, layer: int) -> np.ndarray:
    return rows_of(pool.read(component, layer), pool.layout, component, slots_of(SPAN, PAGE))


def writers_wait_for_slow_gathers(world: World) -> None:
    """The owner changes rows at once; readers that come late to their gather still find what was there before."""
    layout = dsa_layout(LAYERS)
    for how in ("write", "move", "restore", "direct"):
        for inside in (True, False):
            if how == "direct" and inside:
                continue
            pool = world.pool(layout, peer=SlowReader)
            expected = pattern("index_k", 0, (16, layout.component("index_k").page_bytes))
            before = rows_of(expected, layout, "index_k", slots_of(SPAN, PAGE))
            pool.begin_forward([SPAN])
            assert np.array_equal(rows_of_layer(pool, "index_k", 0), before), (how, inside)
            if not inside:
                pool.end_forward()
            if how == "move":
                source, target = torch.tensor([9 * PAGE + 3]), torch.tensor([2 * PAGE + 7])
                pool.move("index_k", source, target)
                rows = rows_of(expected, layout, "index_k", source.numpy())
                put_rows(expected, layout, "index_k", target.numpy(), rows)
            elif how == "restore":
                data = pattern("index_k", 0, (2, layout.component("index_k").page_bytes), salt=77)
                pool.restore("index_k", 0, [2, 9], torch.from_numpy(data) if world.rank == 0 else None)
                expected[[2, 9]] = data
            else:
                slots, fields = torch.tensor([9 * PAGE + 3, 2 * PAGE]), chunk_fields(layout, "index_k", 2, salt=5)
                if how == "write":
                    pool.write("index_k", 0, slots, fields)
                    put_rows(expected, layout, "index_k", slots.numpy(), all_fields(fields))
                elif world.rank == 0:
                    pool.wait_for_readers()
                    pool.region_tensor("index_k", 0).fill_(9)
                if how == "direct":
                    expected[:] = 9
            if not inside:
                pool.begin_forward([SPAN])
            after = rows_of(expected, layout, "index_k", slots_of(SPAN, PAGE))
            assert np.array_equal(rows_of_layer(pool, "index_k", 0), after), (how, inside)
            pool.end_forward()
            pool.close()


class SlowOwner(PeerReader):
    """Rank 0 is slow to make its changes."""

    def before_change(self) -> None:
        super().before_change()
        if self.rank == 0:
            time.sleep(DELAY_S)


def gathers_wait_for_slow_writers(world: World) -> None:
    """The readers ask at once; the owner has yet to make the change that they have made already."""
    layout = dsa_layout(LAYERS)
    pool = world.pool(layout, peer=SlowOwner)
    expected = pattern("latent", 0, (16, layout.component("latent").page_bytes))
    pool.begin_forward([SPAN])
    pool.read("latent", 0)
    for salt in range(3):
        fields = chunk_fields(layout, "latent", 2, salt)
        slots = torch.tensor([9 * PAGE + salt, 2 * PAGE])
        pool.write("latent", 0, slots, fields)
        put_rows(expected, layout, "latent", slots.numpy(), all_fields(fields))
        want = rows_of(expected, layout, "latent", slots_of(SPAN, PAGE))
        assert np.array_equal(rows_of_layer(pool, "latent", 0), want)
    pool.end_forward()


def check_named(error: PdlinkError, rank: int) -> None:
    assert f"shard rank {rank} (global rank {rank})" in str(error), error


def good_forward(pool: LayerShardedPool) -> None:
    pool.begin_forward([SPAN])
    for component, layer in pool.layout.cells():
        refill_scratch(pool)
        check_layer(pool, component, layer, SPAN)
    pool.end_forward()


def ranks_with_other_batches_are_named(world: World) -> None:
    pool = world.pool(dsa_layout(LAYERS))
    order = [("latent", layer) for layer in range(LAYERS)]
    for spans, layers in (
        ([ReadSpan([9, 2, 5], 139)], order),
        ([ReadSpan([9, 2, 6], 140)], order),
        ([SPAN, ReadSpan([1], 1)], order),
        ([SPAN], order[::-1]),
        ([SPAN], []),
    ):
        mine = (spans, layers) if world.rank == 1 else ([SPAN], order)
        error = failure_of(lambda mine=mine: pool.begin_forward(*mine), SOON_S)  # type: ignore[misc]
        assert isinstance(error, IntegrityError)
        check_named(error, 1)
        with pytest.raises(IntegrityError, match="failed"):
            pool.end_forward()
    good_forward(pool)


def a_batch_that_cannot_be_is_heard_of(world: World) -> None:
    pool = world.pool(dsa_layout(LAYERS))
    if world.rank == 1:
        assert isinstance(failure_of(lambda: pool.begin_forward([ReadSpan([99], 5)]), SOON_S), LayoutError)
    else:
        check_named(failure_of(lambda: pool.begin_forward([SPAN]), SOON_S), 1)
    good_forward(pool)


def pools_of_other_sizes_are_named(world: World) -> None:
    pool = world.pool(dsa_layout(LAYERS), 17 if world.rank == 2 else 16)
    error = failure_of(lambda: pool.begin_forward([SPAN]), SOON_S)
    check_named(error, 2)
    assert "pool sizes" in str(error)


def a_change_on_one_rank_alone_is_found(world: World) -> None:
    """Its forward may have read old rows; the next one does not begin."""
    pool = world.pool(dsa_layout(LAYERS))
    pool.begin_forward([SPAN])
    pool.read("latent", 5)
    if world.rank == 1:
        pool.move("latent", torch.tensor([9 * PAGE]), torch.tensor([2 * PAGE]))
    pool.end_forward()
    error = failure_of(lambda: pool.begin_forward([SPAN]), SOON_S)
    check_named(error, 1)
    assert "different numbers of moves" in str(error)


def a_rank_that_does_not_come_is_named(world: World) -> None:
    pool = world.pool(dsa_layout(LAYERS), timeout_s=6.0)
    good_forward(pool)
    if world.rank == 1:
        dist.barrier()
        pool.skip_forward()
    else:
        error = failure_of(lambda: pool.begin_forward([SPAN]), SOON_S)
        assert isinstance(error, DeadlineExceeded)
        check_named(error, 1)
        with pytest.raises(IntegrityError):
            pool.end_forward()
        dist.barrier()
    dist.barrier()
    good_forward(pool)


def a_reader_that_does_not_end_is_named(world: World) -> None:
    """And what it reads is not touched: the write that had to wait is not made."""
    pool = world.pool(dsa_layout(LAYERS), timeout_s=6.0)
    pool.begin_forward([SPAN])
    if world.rank != 1:
        pool.end_forward()
    if world.rank == 0:
        fields = chunk_fields(pool.layout, "latent", 1, salt=5)
        before = pool.region_tensor("latent", 0).clone()
        error = failure_of(lambda: pool.write("latent", 0, torch.tensor([9 * PAGE]), fields), SOON_S)
        assert isinstance(error, DeadlineExceeded)
        check_named(error, 1)
        assert torch.equal(pool.region_tensor("latent", 0), before)
    dist.barrier()
    if world.rank == 1:
        refill_scratch(pool)
        check_layer(pool, "latent", 0, SPAN)
        pool.end_forward()
    dist.barrier()
    good_forward(pool)


def a_reader_serves_one_pool_at_a_time(world: World) -> None:
    pool = world.pool(dsa_layout(LAYERS))
    reader = pool._remote._reader  # the reader that the world made for it
    with pytest.raises(StateError, match="serves a pool already"):
        LayerShardedPool(pool.layout, pool.owned, 16, reader=reader)
    pool.close()
    with pytest.raises(StateError):
        pool.begin_forward([SPAN])


def a_dead_rank_is_named(world: World) -> None:
    """What it has written can still be read; the next forward cannot begin."""
    pool = world.pool(dsa_layout(LAYERS))
    pool.begin_forward([SPAN])
    if world.rank == 1:
        os._exit(0)
    check_layer(pool, "latent", 4, SPAN)
    pool.end_forward()
    error = failure_of(lambda: pool.begin_forward([SPAN]), SOON_S)
    assert isinstance(error, PeerGone)
    check_named(error, 1)


SCENARIOS: dict[str, Callable[[World], None]] = {
    one.__name__: one
    for one in (
        ranks_read_what_they_like,
        an_empty_batch_on_one_rank_is_fine,
        a_rank_without_work_holds_nobody_up,
        writers_wait_for_slow_gathers,
        gathers_wait_for_slow_writers,
        ranks_with_other_batches_are_named,
        a_batch_that_cannot_be_is_heard_of,
        pools_of_other_sizes_are_named,
        a_change_on_one_rank_alone_is_found,
        a_rank_that_does_not_come_is_named,
        a_reader_that_does_not_end_is_named,
        a_reader_serves_one_pool_at_a_time,
        a_dead_rank_is_named,
    )
}
