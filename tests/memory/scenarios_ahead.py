"""Owns scenarios of pools that fetch the next layers while one is used; they run with either reader."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pdlink.errors import IntegrityError
from pdlink.memory.broadcast_reader import BroadcastReader
from pdlink.memory.communicator import GroupCommunicator
from pdlink.memory.forward import LayerKey, ReadSpan
from pdlink.memory.peer_reader import PeerReader
from pdlink.memory.sharded_pool import LayerShardedPool
from tests.memory.rank_world import (
    PAGE,
    World,
    all_fields,
    chunk_fields,
    dsa_layout,
    failure_of,
    owns,
    pattern,
    rows_of,
    slots_of,
)
from tests.memory.scenarios_bytes import put_rows

SPAN = ReadSpan([9, 2, 5, 11], 2 * PAGE + 12)
CHUNK = ReadSpan(SPAN.pages, SPAN.num_tokens + 20)
LAYERS = 6
SOON_S = 30.0


def check(pool: LayerShardedPool, key: LayerKey, salt: int = 0) -> None:
    want = pattern(*key, (pool.num_pages, pool.layout.component(key[0]).page_bytes), salt)
    live = slots_of(SPAN, PAGE)
    came = rows_of(pool.read(*key), pool.layout, key[0], live)
    assert np.array_equal(came, rows_of(want, pool.layout, key[0], live)), key


def layers_come_in_order_while_others_are_used(world: World) -> None:
    """Every layer right, and read while the fetch of a later one has been let through."""
    for slots in (2, 3):
        pool = world.pool(dsa_layout(LAYERS), scratch_slots=slots)
        keys = sorted(pool.layout.cells(), key=lambda key: (key[1], key[0]))
        for order in (keys, keys[::-1]):
            pool.begin_forward([SPAN], order)
            for key in order:
                check(pool, key)
                check(pool, key)
            pool.end_forward()


def the_next_layer_is_fetched_while_this_one_is_used(world: World) -> None:
    """The reading thread does not come back before the fetch of the layer after this one has begun."""
    begun: dict[int, threading.Event] = {layer: threading.Event() for layer in range(LAYERS)}
    if world.kind == "peer":

        class Telling(PeerReader):
            def fetch(self, step: Any, *args: Any, **kwargs: Any) -> None:
                begun[step.layer].set()
                super().fetch(step, *args, **kwargs)

        pool = world.pool(dsa_layout(LAYERS), peer=Telling)
    else:

        class TellingBroadcast(BroadcastReader):
            def fetch(self, step: Any, *args: Any, **kwargs: Any) -> None:
                begun[step.layer].set()
                super().fetch(step, *args, **kwargs)

        pool = world.pool(dsa_layout(LAYERS), broadcast=TellingBroadcast)
    order = [("latent", layer) for layer in range(LAYERS)]
    pool.begin_forward([SPAN], order)
    fetched = [key for key in order if world.kind == "broadcast" or not owns(pool, *key)]
    for number, key in enumerate(order):
        check(pool, key)
        if key in fetched and fetched.index(key) + 1 < len(fetched):
            assert begun[fetched[fetched.index(key) + 1][1]].wait(SOON_S), number
        check(pool, key)
    pool.end_forward()


def reads_out_of_order_are_right(world: World) -> None:
    pool = world.pool(dsa_layout(LAYERS))
    keys = list(pool.layout.cells())
    for reads in ([keys[3], keys[0], keys[3]], keys[::-1], [keys[0], keys[5], keys[1], keys[2]], [], keys[:1]):
        pool.begin_forward([SPAN], keys)
        for key in reads:
            check(pool, key)
        pool.end_forward()


def chunk_rows_written_before_the_layer_came_stay(world: World) -> None:
    """The chunk's rows are written while the layer's own fetch is under way, or before it has begun."""
    pool = world.pool(dsa_layout(LAYERS))
    layout = pool.layout
    keys = list(layout.cells())
    new = slots_of(CHUNK, PAGE, SPAN.num_tokens)
    for before in (True, False):
        pool.begin_forward([SPAN], keys)
        for key in keys:
            fields = chunk_fields(layout, key[0], len(new), salt=50 + world.rank)
            if not before:
                check(pool, key)
            pool.write(*key, torch.from_numpy(new), fields)
            came = pool.read(*key)
            assert np.array_equal(rows_of(came, layout, key[0], new), all_fields(fields))
            check(pool, key)
        pool.end_forward()


def rows_changed_after_they_were_fetched_are_fetched_again(world: World) -> None:
    pool = world.pool(dsa_layout(LAYERS))
    layout = pool.layout
    keys = [("latent", layer) for layer in range(LAYERS)]
    source, target = torch.tensor([9 * PAGE + 3]), torch.tensor([2 * PAGE + 7])
    pool.begin_forward([SPAN], keys)
    check(pool, keys[0])
    pool.move("latent", source, target)
    for key in keys:
        expected = pattern(*key, (pool.num_pages, layout.component("latent").page_bytes))
        rows = rows_of(expected, layout, "latent", source.numpy())
        put_rows(expected, layout, "latent", target.numpy(), rows)
        live = slots_of(SPAN, PAGE)
        came = rows_of(pool.read(*key), layout, "latent", live)
        assert np.array_equal(came, rows_of(expected, layout, "latent", live)), key
    pool.end_forward()


class NoBroadcast(GroupCommunicator):
    """From the third broadcast on, nothing comes."""

    count = 0

    def broadcast(self, data: torch.Tensor, root: int, what: str) -> None:
        self.count += 1
        if self.count < 3:
            super().broadcast(data, root, what)


class Failing(PeerReader):
    """Rank 1 fails in its second fetch."""

    count = 0

    def fetch(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1
        if self.rank == 1 and self.count == 2:
            raise IntegrityError("made to fail")
        super().fetch(*args, **kwargs)


def a_fetch_that_fails_ahead_fails_the_forward(world: World) -> None:
    """With broadcasts on all ranks; where each gathers for itself, on that rank alone. The next forward is right."""
    pool = world.pool(dsa_layout(LAYERS), communicator=NoBroadcast, peer=Failing)
    keys = [("latent", layer) for layer in range(LAYERS)]

    def run() -> None:
        pool.begin_forward([SPAN], keys)
        for key in keys:
            check(pool, key)
        pool.end_forward()

    if world.kind == "broadcast" or world.rank == 1:
        assert isinstance(failure_of(run, SOON_S), IntegrityError)
        if pool._remote.forward is not None:
            with pytest.raises(IntegrityError):
                pool.end_forward()
    else:
        run()
    if world.kind == "peer":
        run()


def ranks_that_leave_the_order_fail_together_or_not_at_all(world: World) -> None:
    """One rank skips a layer, swaps two, ends early or reads one more. What is read is right; nobody waits for long."""
    pool = world.pool(dsa_layout(LAYERS))
    keys = list(pool.layout.cells())
    ways = [keys[:2] + keys[3:], keys[:-1], [*keys[:4], keys[5], keys[4], *keys[6:]], [keys[-1], *keys], keys[:3]]
    for odd in (0, 1):
        for reads in ways:
            failed, started = 0, time.monotonic()
            try:
                pool.begin_forward([SPAN], keys)
                for key in reads if world.rank == odd else keys:
                    check(pool, key)
                pool.end_forward()
            except IntegrityError:
                failed = 1
                if pool._remote.forward is not None:
                    with pytest.raises(IntegrityError):
                        pool.end_forward()
            assert time.monotonic() - started < SOON_S
            every = [torch.zeros(1) for _ in range(world.num_ranks)]
            dist.all_gather(every, torch.tensor([float(failed)]))
            assert len({float(one) for one in every}) == 1, (odd, reads)
            assert world.kind == "broadcast" or not failed
        pool.begin_forward([SPAN], keys)
        for key in keys:
            check(pool, key)
        pool.end_forward()


SCENARIOS: dict[str, Callable[[World], None]] = {
    one.__name__: one
    for one in (
        layers_come_in_order_while_others_are_used,
        the_next_layer_is_fetched_while_this_one_is_used,
        reads_out_of_order_are_right,
        chunk_rows_written_before_the_layer_came_stay,
        rows_changed_after_they_were_fetched_are_fetched_again,
        a_fetch_that_fails_ahead_fails_the_forward,
        ranks_that_leave_the_order_fail_together_or_not_at_all,
    )
}
