"""Owns scenarios in which a rank or its communicator goes wrong: every rank must hear of it, soon, and by name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch

from pdlink.errors import DeadlineExceeded, IntegrityError, InvalidInput, LayoutError, PdlinkError, PeerGone, StateError
from pdlink.memory.communicator import GroupCommunicator
from pdlink.memory.forward import ReadSpan
from pdlink.memory.sharded_pool import LayerShardedPool
from tests.memory.rank_world import PAGE, UNTOUCHED, World, dsa_layout, failure_of, owns
from tests.memory.scenarios_bytes import check_layer, refill_scratch

SPAN = ReadSpan([9, 2, 5], 140)
LAYERS = 6
# Far below the 20 s that a pool of these scenarios waits for a rank: nobody heard of it by a time limit.
SOON_S = 30.0


class NoBroadcast(GroupCommunicator):
    """A communicator that is disabled and says nothing of it."""

    def broadcast(self, data: torch.Tensor, root: int, what: str) -> None:
        del data, root, what


class NoGather(GroupCommunicator):
    def gather(self, record: torch.Tensor, what: str) -> torch.Tensor:
        return torch.zeros((len(self.global_ranks), len(record)), dtype=record.dtype)


class OneRankHearsNothing(GroupCommunicator):
    """Works, but what is broadcast never reaches shard rank 2's buffer."""

    def broadcast(self, data: torch.Tensor, root: int, what: str) -> None:
        super().broadcast(data.clone() if self.rank == 2 else data, root, what)


class Replay(GroupCommunicator):
    """From the third broadcast on, brings the bytes of the second again."""

    kept: torch.Tensor
    count = 0

    def broadcast(self, data: torch.Tensor, root: int, what: str) -> None:
        super().broadcast(data, root, what)
        self.count += 1
        if self.count == 2:
            self.kept = data.clone()
        elif self.count > 2 and self.rank != root:
            data.copy_(self.kept)


def end_and_go_on(pool: LayerShardedPool) -> None:
    """The failed forward says so once more at its end, and the next one is right."""
    with pytest.raises(IntegrityError, match="failed"):
        pool.end_forward()
    good_forward(pool)


def good_forward(pool: LayerShardedPool) -> None:
    pool.begin_forward([SPAN])
    for component, layer in pool.layout.cells():
        refill_scratch(pool)
        check_layer(pool, component, layer, SPAN)
    pool.end_forward()


def check_named(error: PdlinkError, rank: int) -> None:
    assert isinstance(error, IntegrityError)
    assert f"shard rank {rank} (global rank {rank})" in str(error), error


def a_broadcast_that_moves_nothing_is_found(world: World) -> None:
    pool = world.pool(dsa_layout(LAYERS), communicator=NoBroadcast)
    for component, layer in pool.layout.cells():
        pool.begin_forward([SPAN])
        if owns(pool, component, layer):
            pool.read(component, layer)
            error = failure_of(pool.end_forward, SOON_S)
        else:
            error = failure_of(lambda key=(component, layer): pool.read(*key), SOON_S)  # type: ignore[misc]
            assert "brought nothing" in str(error)
            assert f"{component!r} layer {layer}" in str(error)
            with pytest.raises(IntegrityError):
                pool.read(component, layer)
            with pytest.raises(IntegrityError):
                pool.end_forward()
        assert isinstance(error, IntegrityError)
        for buffer in pool.scratch_buffers(component):
            assert (buffer == UNTOUCHED).all()


def an_exchange_that_moves_nothing_is_found(world: World) -> None:
    pool = world.pool(dsa_layout(LAYERS), communicator=NoGather)
    assert "sent no record" in str(failure_of(lambda: pool.begin_forward([SPAN]), SOON_S))


def one_rank_that_hears_nothing_stops_all(world: World) -> None:
    pool = world.pool(dsa_layout(LAYERS), communicator=OneRankHearsNothing)
    pool.begin_forward([SPAN])
    if world.rank == 2:
        assert "brought nothing" in str(failure_of(lambda: pool.read("latent", 0), SOON_S))
    else:
        pool.read("latent", 0)
        check_named(failure_of(lambda: pool.read("latent", 1), SOON_S), 2)
    with pytest.raises(IntegrityError, match="failed"):
        pool.end_forward()


def old_bytes_are_not_taken_for_new(world: World) -> None:
    """The same pages of the same component, only of an earlier layer."""
    pool = world.pool(dsa_layout(LAYERS), communicator=Replay)
    pool.begin_forward([SPAN])
    pool.read("latent", 0)
    pool.read("latent", 1)
    if owns(pool, "latent", 2):
        pool.read("latent", 2)
        error = failure_of(pool.end_forward, SOON_S)
    else:
        error = failure_of(lambda: pool.read("latent", 2), SOON_S)
        assert "brought the read of 'latent' layer 1" in str(error)
    assert isinstance(error, IntegrityError)


def another_layer_on_one_rank(world: World) -> None:
    pool = world.pool(dsa_layout(LAYERS))
    for component, layer in (("latent", 3), ("index_k", 0)):
        pool.begin_forward([SPAN])
        key = (component, layer) if world.rank == 1 else ("latent", 0)
        error = failure_of(lambda key=key: pool.read(*key), SOON_S)  # type: ignore[misc]
        check_named(error, 1)
        assert f"{component!r} layer {layer}" in str(error)
        assert "'latent' layer 0" in str(error)
        end_and_go_on(pool)


def a_layer_skipped_on_one_rank(world: World) -> None:
    pool = world.pool(dsa_layout(LAYERS))
    for skipped in (0, 2, LAYERS - 1):
        pool.begin_forward([SPAN])

        def read_all(skipped: int = skipped) -> None:
            for layer in range(LAYERS):
                if world.rank != 2 or layer != skipped:
                    pool.read("latent", layer)
            pool.end_forward()

        check_named(failure_of(read_all, SOON_S), 2)
        if skipped < LAYERS - 1 or world.rank != 2:
            with pytest.raises((IntegrityError, StateError)):
                pool.end_forward()
        good_forward(pool)


def another_order_on_one_rank(world: World) -> None:
    pool = world.pool(dsa_layout(LAYERS))
    pool.begin_forward([SPAN])
    pool.read("latent", 5)
    order = [2, 1] if world.rank == 3 else [1, 2]
    check_named(failure_of(lambda: [pool.read("latent", layer) for layer in order], SOON_S), 3)
    end_and_go_on(pool)


def another_batch_on_one_rank(world: World) -> None:
    """No batch, a token less, other pages, other page order, another layer order: found before anything moves."""
    pool = world.pool(dsa_layout(LAYERS))
    order = [("latent", layer) for layer in range(LAYERS)]
    for spans, layers in (
        ([], order),
        ([ReadSpan([9, 2, 5], 139)], order),
        ([ReadSpan([9, 2, 6], 140)], order),
        ([SPAN, ReadSpan([1], 1)], order),
        ([SPAN], order[::-1]),
        ([SPAN], []),
    ):
        moved = pool.stats.nbytes_moved
        mine = (spans, layers) if world.rank == 1 else ([SPAN], order)
        check_named(failure_of(lambda mine=mine: pool.begin_forward(*mine), SOON_S), 1)  # type: ignore[misc]
        assert pool.stats.nbytes_moved == moved
        end_and_go_on(pool)


def a_batch_that_cannot_be_on_one_rank(world: World) -> None:
    pool = world.pool(dsa_layout(LAYERS))
    if world.rank == 3:
        assert isinstance(failure_of(lambda: pool.begin_forward([ReadSpan([99], 5)]), SOON_S), LayoutError)
    else:
        check_named(failure_of(lambda: pool.begin_forward([SPAN]), SOON_S), 3)
    good_forward(pool)


def one_forward_more_on_one_rank(world: World) -> None:
    """A rank that was a forward behind is told so, not paired with another forward's reads."""
    pool = world.pool(dsa_layout(LAYERS))
    pool.begin_forward([SPAN])
    error = failure_of(lambda: pool.end_forward() if world.rank == 0 else pool.read("latent", 0), SOON_S)
    check_named(error, 0)
    good_forward(pool)


def another_pool_size_on_one_rank(world: World) -> None:
    pool = world.pool(dsa_layout(LAYERS), 17 if world.rank == 2 else 16)
    error = failure_of(lambda: pool.begin_forward([SPAN]), SOON_S)
    check_named(error, 2)
    assert "pool sizes" in str(error)


def a_change_on_the_owner_alone(world: World) -> None:
    """A move that one rank makes and the others do not: never taken for unchanged beyond the forward."""
    pool = world.pool(dsa_layout(LAYERS))

    def run() -> None:
        pool.begin_forward([SPAN])
        pool.read("latent", 5)
        if owns(pool, "latent", 5):
            pool.move("latent", torch.tensor([9 * PAGE]), torch.tensor([2 * PAGE]))
        pool.read("latent", 5)
        pool.end_forward()

    assert isinstance(failure_of(run, SOON_S), IntegrityError)


def a_rank_that_stops(world: World) -> None:
    """It makes no call any more: the others wait for their time limit, and the group is no use from then on."""
    pool = world.pool(dsa_layout(LAYERS), timeout_s=4.0)
    pool.begin_forward([SPAN])
    pool.read("latent", 1)
    if world.rank == 1:
        time.sleep(10.0)
    error = failure_of(lambda: pool.read("latent", 4), 4.0 + SOON_S)
    assert isinstance(error, DeadlineExceeded | IntegrityError)
    assert "'latent' layer 4" in str(error)
    if world.rank == 0:
        assert "global ranks 1, 2, 3" in str(error)
    with pytest.raises(IntegrityError):
        pool.end_forward()
    assert "has failed before" in str(failure_of(lambda: pool.begin_forward([SPAN]), SOON_S))


def a_rank_that_dies(world: World) -> None:
    pool = world.pool(dsa_layout(LAYERS))
    pool.begin_forward([SPAN])
    if world.rank == 1:
        os._exit(0)
    error = failure_of(lambda: pool.read("latent", 4), SOON_S)
    assert isinstance(error, PeerGone)
    assert "'latent' layer 4" in str(error)
    assert "shard rank 1 (global rank 1)" in str(error)


def ranks_inside_the_group_are_not_taken_for_global_ones(world: World) -> None:
    """Ranks 2 and 3 form a group and say [0, 1]."""
    if world.rank >= 2:
        with pytest.raises(InvalidInput, match="give global ranks"):
            GroupCommunicator([0, 1], timeout_s=1)
    with pytest.raises(InvalidInput, match="not a set of ranks"):
        GroupCommunicator([world.rank, 4], timeout_s=1)
    with pytest.raises(InvalidInput, match="not a set of ranks"):
        GroupCommunicator([world.rank, world.rank], timeout_s=1)


def reads_need_a_forward(world: World) -> None:
    """Calls out of turn are refused where they are made, and nobody else notices."""
    pool = world.pool(dsa_layout(LAYERS))
    remote = next(layer for layer in range(LAYERS) if not owns(pool, "latent", layer))
    with pytest.raises(StateError):
        pool.read("latent", remote)
    with pytest.raises(StateError):
        pool.end_forward()
    with pytest.raises(LayoutError):
        pool.region_tensor("latent", remote)
    with pytest.raises(LayoutError):
        pool.backup("latent", remote, [1])
    pool.begin_forward([SPAN])
    with pytest.raises(StateError):
        pool.begin_forward([SPAN])
    with pytest.raises(LayoutError):
        pool.read("latent", LAYERS)
    with pytest.raises(LayoutError):
        pool.restore("latent", remote, [1], torch.zeros((1, PAGE * 656), dtype=torch.uint8))
    check_layer(pool, "latent", 0, SPAN)
    pool.end_forward()
    good_forward(pool)


SCENARIOS: dict[str, Callable[[World], None]] = {
    one.__name__: one
    for one in (
        a_broadcast_that_moves_nothing_is_found,
        an_exchange_that_moves_nothing_is_found,
        one_rank_that_hears_nothing_stops_all,
        old_bytes_are_not_taken_for_new,
        another_layer_on_one_rank,
        a_layer_skipped_on_one_rank,
        another_order_on_one_rank,
        another_batch_on_one_rank,
        a_batch_that_cannot_be_on_one_rank,
        one_forward_more_on_one_rank,
        another_pool_size_on_one_rank,
        a_change_on_the_owner_alone,
        a_rank_that_stops,
        ranks_inside_the_group_are_not_taken_for_global_ones,
        reads_need_a_forward,
        a_rank_that_dies,
    )
}
