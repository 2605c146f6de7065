"""Owns scenarios of pools on real GPUs that no pretence can stand for: late kernels, a dud NCCL, a host that runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pdlink.errors import IntegrityError, StateError
from pdlink.layout import CacheLayout
from pdlink.memory.forward import LayerKey
from pdlink.memory.pool_device import PoolDevice
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
from tests.memory.scenarios_lanes import CHUNK, SPAN, good_forward, order_of

LAYERS = 8
CYCLES = 200_000_000
"""Of a kernel that only sleeps: about 0.1 s."""
SOON_S = 30.0


def device_of(world: World, **changes: Callable[..., Any]) -> PoolDevice:
    """This rank's GPU, with some of its methods in other hands: each is given what it stands for, and its arguments."""
    device = world.gpu()
    for name, change in changes.items():
        original = getattr(device, name)
        setattr(device, name, lambda *args, change=change, original=original: change(original, *args))
    return device


def late(original: Callable[..., Any], *args: Any) -> Any:
    """Gathers start late, on the device."""
    torch.cuda._sleep(CYCLES // 20)
    return original(*args)


def write_and_read(pool: LayerShardedPool, keys: Sequence[LayerKey], slots: torch.Tensor, *, salt: int) -> None:
    """One forward with rows of a chunk, all on the device; bytes are looked at once everything has been launched."""
    layout, came = pool.layout, {}
    pool.begin_forward([SPAN], keys)
    for key in keys:
        rows = chunk_fields(layout, key[0], len(slots), salt=salt + key[1])
        pool.write(*key, slots, {name: data.cuda() for name, data in rows.items()})
        # A copy on the engine's stream is what attention would be.
        came[key] = pool.read(*key).clone()
    pool.end_forward()
    for key in keys:
        want = pattern(*key, (pool.num_pages, layout.component(key[0]).page_bytes))
        live = slots_of(SPAN, PAGE)
        assert np.array_equal(rows_of(came[key], layout, key[0], live), rows_of(want, layout, key[0], live)), key
        fields = chunk_fields(layout, key[0], len(slots), salt=salt + key[1])
        assert np.array_equal(rows_of(came[key], layout, key[0], slots.cpu().numpy()), all_fields(fields)), key


def chunk_rows_survive_gathers_that_a_sleeping_kernel_delays(world: World) -> None:
    layout = dsa_layout(LAYERS)

    def slow_copy(original: Callable[..., Any], *args: Any) -> Any:
        with torch.cuda.stream(device._fetch):  # type: ignore[attr-defined]
            return late(original, *args)

    device = device_of(world, copy=slow_copy)
    pool = world.pool(layout, device=device)
    slots = torch.from_numpy(slots_of(CHUNK, PAGE, SPAN.num_tokens)).cuda()
    for salt in (1, 50, 100):
        write_and_read(pool, order_of(layout), slots, salt=salt)


def the_host_waits_for_no_layer(world: World) -> None:
    """While the engine's stream sleeps, every read and write of a forward is launched."""
    layout = dsa_layout(LAYERS)
    pool = world.pool(layout, device=device_of(world))
    keys = order_of(layout)
    slots = torch.from_numpy(slots_of(CHUNK, PAGE, SPAN.num_tokens)).cuda()
    write_and_read(pool, keys, slots, salt=1)
    rows = {
        name: {field: data.cuda() for field, data in chunk_fields(layout, name, len(slots), salt=1).items()}
        for name in ("latent", "index_k")
    }
    dist.barrier()
    torch.cuda.synchronize()
    pool.begin_forward([SPAN], keys)
    pool.write(*keys[0], slots, rows[keys[0][0]])  # which looks at the slots, once
    torch.cuda._sleep(20 * CYCLES)
    asleep = torch.cuda.Event()
    asleep.record()
    for key in keys:
        pool.read(*key)
        pool.write(*key, slots, rows[key[0]])
    assert not asleep.query(), "the host was held until the device had slept"
    pool.end_forward()


def a_dud_nccl_poisons_and_raises(world: World) -> None:
    """A broadcast that returns and moves nothing, as a disabled communicator's does."""
    layout = dsa_layout(LAYERS)
    keys = order_of(layout)
    works = [True]

    def link(original: Callable[..., Any], *args: Any) -> Any:
        made = original(*args)
        broadcast = made.broadcast
        made.broadcast = lambda *given: broadcast(*given) if works[0] else None
        return made

    pool = world.pool(layout, device=device_of(world, link=link))
    good_forward(pool, keys)
    works[0] = False
    pool.begin_forward([SPAN], keys)
    came = {key: pool.read(*key).clone() for key in keys}
    assert isinstance(failure_of(pool.end_forward, SOON_S), IntegrityError)
    for key in keys:
        assert owns(pool, *key) or (rows_of(came[key], layout, key[0], slots_of(SPAN, PAGE)) == 0xFF).all(), key
    works[0] = True
    good_forward(pool, keys)


def a_rank_that_leaves_the_order_is_heard_of_though_nccl_waits(world: World) -> None:
    """Rank 1 ends early: rank 0 has launched a broadcast that nobody joins, which is aborted; the next works."""
    layout = dsa_layout(LAYERS)
    keys = order_of(layout)
    pool = world.pool(layout, device=device_of(world), timeout_s=5.0)

    def forward() -> None:
        pool.begin_forward([SPAN], keys)
        for key in keys[:3] if world.rank == 1 else keys:
            pool.read(*key)
        pool.end_forward()

    started = time.monotonic()
    assert isinstance(failure_of(forward, SOON_S), IntegrityError)
    if pool._remote.forward is not None:
        failure_of(pool.end_forward, SOON_S)
    assert time.monotonic() - started < SOON_S
    good_forward(pool, keys)


def what_is_between_reads_is_captured_once_and_replayed(world: World) -> None:
    """With one order a layer has the same scratch buffer in every forward; a read inside a capture is refused."""
    layout = CacheLayout(4, dsa_layout(4).components)
    pool = world.pool(layout, device=device_of(world))
    keys = [key for key in order_of(layout) if key[0] == "latent"]
    graphs: dict[LayerKey, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
    for number, span in enumerate((SPAN, SPAN, CHUNK)):
        sums = {}
        pool.begin_forward([span], keys)
        for key in keys:
            page = pool.read(*key)[span.pages[0]]
            if number == 0:
                continue
            if key not in graphs:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    total = page.to(torch.int64).sum()
                graphs[key] = graph, total
            graphs[key][0].replay()
            sums[key] = graphs[key][1].clone()
        pool.end_forward()
        for key, total in sums.items():
            want = pattern(*key, (pool.num_pages, layout.component(key[0]).page_bytes))[span.pages[0]]
            assert int(total) == int(want.astype(np.int64).sum()), key
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(StateError, match="inside a CUDA graph"):
        pool.begin_forward([SPAN], keys)


PEER = (
    chunk_rows_survive_gathers_that_a_sleeping_kernel_delays,
    the_host_waits_for_no_layer,
    what_is_between_reads_is_captured_once_and_replayed,
)
BROADCAST = (*PEER, a_dud_nccl_poisons_and_raises, a_rank_that_leaves_the_order_is_heard_of_though_nccl_waits)
SCENARIOS: dict[str, Callable[[World], None]] = {one.__name__: one for one in BROADCAST}
