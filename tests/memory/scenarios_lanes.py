"""Owns scenarios of pools whose fetches are launched in a lane: what goes wrong there poisons, then raises."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pdlink.errors import DeadlineExceeded, IntegrityError, PdlinkError
from pdlink.layout import CacheLayout
from pdlink.memory.communicator import GroupCommunicator
from pdlink.memory.forward import LayerKey, ReadSpan
from pdlink.memory.pool_device import Lane
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
from tests.memory.thread_device import POISON, ThreadDevice

SPAN = ReadSpan([9, 2, 5], 2 * PAGE + 12)
CHUNK = ReadSpan(SPAN.pages, SPAN.num_tokens + 20)
LAYERS = 6
SOON_S = 30.0
SHORT_S = 1.0


class Dud(GroupCommunicator):
    """Broadcasts return at once, and nothing has moved."""

    works = False

    def broadcast(self, data: torch.Tensor, root: int, what: str) -> None:
        if Dud.works:
            super().broadcast(data, root, what)


class LaterDevice(ThreadDevice):
    """COMPUTE is behind the host, as a stream is: nobody looks at what it would have done."""

    def join(self, mark: object) -> None: ...


class SlowLane(ThreadDevice):
    """Gathers of ranks other than 0 are late."""

    slow_s = 0.0

    def copy(self, *args: Any) -> None:
        self.launch(lambda: time.sleep(self.slow_s))
        super().copy(*args)


def order_of(layout: CacheLayout) -> list[LayerKey]:
    return sorted(layout.cells(), key=lambda key: (key[1], key[0]))


def good_forward(pool: LayerShardedPool, keys: Sequence[LayerKey]) -> None:
    pool.begin_forward([SPAN], keys)
    for key in keys:
        want = pattern(*key, (pool.num_pages, pool.layout.component(key[0]).page_bytes))
        live = slots_of(SPAN, PAGE)
        came = rows_of(pool.read(*key), pool.layout, key[0], live)
        assert np.array_equal(came, rows_of(want, pool.layout, key[0], live)), key
    pool.end_forward()


def a_broadcast_that_moves_nothing_poisons_and_raises(world: World) -> None:
    layout = dsa_layout(LAYERS)
    keys = order_of(layout)
    for order in (keys, []):
        Dud.works = False
        pool = world.pool(layout, device=ThreadDevice(Dud))
        pool.begin_forward([SPAN], order)
        for key in keys:
            came = rows_of(pool.read(*key), layout, key[0], slots_of(SPAN, PAGE))
            assert owns(pool, *key) or (came == POISON).all(), key
        error = failure_of(pool.end_forward, SOON_S)
        assert isinstance(error, IntegrityError)
        assert "communicator does not work" in str(error) or "failed the end" in str(error), error
        Dud.works = True
        good_forward(pool, order or keys)


def ranks_that_leave_the_order_all_hear_of_it(world: World) -> None:
    """Rank 1 swaps two layers, or ends early; the others have launched the rest, and nobody waits for long."""
    layout = dsa_layout(LAYERS)
    keys = order_of(layout)
    for how in ("swap", "end early"):
        pool = world.pool(layout, device=LaterDevice())
        good = world.pool(layout)

        def forward(pool: LayerShardedPool = pool, how: str = how) -> None:
            mine = list(keys)
            if world.rank == 1:
                mine = mine[:4] if how == "end early" else [*mine[:3], mine[5], mine[4], mine[3], *mine[6:]]
            pool.begin_forward([SPAN], keys)
            for key in mine:
                pool.read(*key)
            pool.end_forward()

        error = failure_of(forward, SOON_S)
        assert isinstance(error, IntegrityError), error
        if pool._remote.forward is not None:
            failure_of(pool.end_forward, SOON_S)
        pool.begin_forward([SPAN], keys)
        pool.read(*keys[0])
        pool.read(*keys[-1])
        error_or_none(pool.end_forward)
        good_forward(good, keys)


def error_or_none(call: Callable[[], object]) -> PdlinkError | None:
    try:
        call()
    except PdlinkError as error:
        return error
    return None


def rows_of_an_owner_that_is_late_are_poison(world: World) -> None:
    """Rank 0 does not say that it has written: the others raise at the end, by its name, and go on afterwards."""
    layout = dsa_layout(LAYERS)
    pool = world.pool(layout, timeout_s=SHORT_S, device=(silent := Silent(world.rank == 0)))
    pool.begin_forward([SPAN])
    came = rows_of(pool.read("latent", 0), layout, "latent", slots_of(SPAN, PAGE))
    dist.barrier()
    silent.is_silent = False
    if world.rank:
        assert (came == POISON).all()
        error = failure_of(pool.end_forward, SOON_S)
        assert isinstance(error, DeadlineExceeded)
        assert "shard rank 0" in str(error)
    else:
        pool.end_forward()
    pool.begin_forward([SPAN])
    came = rows_of(pool.read("latent", 0), layout, "latent", slots_of(SPAN, PAGE))
    want = pattern("latent", 0, (pool.num_pages, PAGE * 656))
    assert np.array_equal(came, rows_of(want, layout, "latent", slots_of(SPAN, PAGE)))
    pool.end_forward()


class Silent(ThreadDevice):
    """Says nothing of what has been written, while it is silent."""

    def __init__(self, is_silent: bool) -> None:
        super().__init__()
        self.is_silent = is_silent
        self._is_made = False

    def advance(self, lane: Lane, word: int, value: int) -> None:
        if self.is_silent and self._is_made and lane is Lane.COMPUTE:
            return
        self._is_made = True
        super().advance(lane, word, value)


def a_change_under_a_slow_gather_is_told_of_on_both_sides(world: World) -> None:
    """The owner waits in vain and goes on: it says so itself, and the rank whose rows may be mixed hears of it."""
    layout = dsa_layout(LAYERS)
    device, go_on = ThreadDevice(), threading.Event()
    pool = world.pool(layout, timeout_s=SHORT_S, device=device)
    pool.begin_forward([SPAN], order_of(layout))
    if world.rank == 1:
        device.launch(lambda: assert_(go_on.wait(SOON_S)))
    source, target = torch.tensor([9 * PAGE + 3]), torch.tensor([2 * PAGE + 7])
    pool.move("latent", source, target)
    if world.rank != 1:
        error = failure_of(pool.end_forward, SOON_S)
        assert isinstance(error, DeadlineExceeded), error
        assert "shard rank 1" in str(error)
        dist.barrier()
        return
    dist.barrier()
    go_on.set()
    error = failure_of(pool.end_forward, SOON_S)
    assert isinstance(error, IntegrityError), error
    assert "may still have been reading" in str(error)


def assert_(it_holds: bool) -> None:
    assert it_holds


def chunk_rows_come_after_a_late_gather(world: World) -> None:
    """Rows of the current chunk share a page with the prefix; that travels whole, late, and they are still there."""
    layout = dsa_layout(LAYERS)
    device = SlowLane()
    device.slow_s = 0.01
    pool = world.pool(layout, device=device)
    slots = torch.from_numpy(slots_of(CHUNK, PAGE, SPAN.num_tokens))
    keys = order_of(layout)
    pool.begin_forward([SPAN], keys)
    for key in keys:
        fields = chunk_fields(layout, key[0], len(slots), salt=key[1])
        pool.write(*key, slots, fields)
        came = pool.read(*key)
        assert np.array_equal(rows_of(came, layout, key[0], slots.numpy()), all_fields(fields)), key
        want = pattern(*key, (pool.num_pages, layout.component(key[0]).page_bytes))
        live = slots_of(SPAN, PAGE)
        assert np.array_equal(rows_of(came, layout, key[0], live), rows_of(want, layout, key[0], live)), key
    pool.end_forward()


BROADCAST: dict[str, Callable[[World], None]] = {
    one.__name__: one
    for one in (a_broadcast_that_moves_nothing_poisons_and_raises, ranks_that_leave_the_order_all_hear_of_it)
}
PEER: dict[str, Callable[[World], None]] = {
    one.__name__: one
    for one in (rows_of_an_owner_that_is_late_are_poison, a_change_under_a_slow_gather_is_told_of_on_both_sides)
}
SCENARIOS: dict[str, Callable[[World], None]] = {
    **BROADCAST,
    **PEER,
    chunk_rows_come_after_a_late_gather.__name__: chunk_rows_come_after_a_late_gather,
}
