"""Owns scenarios of what engines store and ask for: storage formats, rows from a host pool, the choice of a reader."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from pdlink.config import Settings
from pdlink.layout import CacheLayout, LayerPlan, ParallelSizes, RankCoordinates
from pdlink.layout.components import Component, Field, heads, index_k, latent
from pdlink.memory.cache_view import CacheView
from pdlink.memory.forward import ReadSpan
from pdlink.memory.open_reader import open_reader
from pdlink.memory.owners import ShardOwners
from pdlink.memory.sharded_pool import LayerShardedPool
from tests.memory.rank_world import PAGE, World, all_fields, chunk_fields, dsa_layout, pattern, rows_of, slots_of
from tests.memory.scenarios_bytes import check_layer, put_rows
from tests.memory.thread_device import ThreadDevice


def storage_formats() -> list[CacheLayout]:
    """What engines store: bf16 rows, packed fp8 rows in two fields, page-shaped indexer keys, plain keys and values."""
    packed = (Field("nope", 0, 512 + 16, 656), Field("rope", 512 + 16, 128, 656))
    layers = range(4)
    return [
        CacheLayout(4, (latent(PAGE, layers, bytes_per_token=1152), index_k(PAGE, layers))),
        CacheLayout(4, (Component("latent", "float8_e4m3fn", PAGE, PAGE * 656, tuple(layers), packed),)),
        CacheLayout(4, tuple(heads(n, 16, layers, num_heads=2, head_bytes=256, dtype="bfloat16") for n in ("k", "v"))),
    ]


def every_storage_format_arrives(world: World) -> None:
    """Prefixes that end inside a page, rows of a chunk in that page, and a move from page to page."""
    for layout in storage_formats():
        pool = world.pool(layout)
        size = layout.components[0].page_size
        span, chunk = ReadSpan([9, 2, 5], size + 5), ReadSpan([9, 2, 5], size + 8)
        live, slots = slots_of(span, size), slots_of(chunk, size, size + 5)
        source, target = np.array([9 * size + 1, 2 * size + 3]), np.array([2 * size + 4, 9 * size])
        for component, layer in layout.cells():
            expected = pattern(component, layer, (16, layout.component(component).page_bytes))
            fields = chunk_fields(layout, component, len(slots), salt=layer)
            pool.begin_forward([span])
            pool.write(component, layer, torch.from_numpy(slots), fields)
            came = pool.read(component, layer)
            assert np.array_equal(rows_of(came, layout, component, live), rows_of(expected, layout, component, live))
            assert np.array_equal(rows_of(came, layout, component, slots), all_fields(fields)), (component, layer)
            pool.move(component, torch.from_numpy(source), torch.from_numpy(target))
            put_rows(expected, layout, component, target, rows_of(expected, layout, component, source))
            came = pool.read(component, layer)
            assert np.array_equal(rows_of(came, layout, component, live), rows_of(expected, layout, component, live))
            assert np.array_equal(rows_of(came, layout, component, slots), all_fields(fields)), (component, layer)
            pool.end_forward()
            pool.move(component, torch.from_numpy(target[:0]), torch.from_numpy(target[:0]))
            undo(pool, component)


def undo(pool: LayerShardedPool, component: str) -> None:
    """Owned layers as they were made, once nobody reads them."""
    pool.wait_for_readers()
    for layer in pool.owned.get(component, ()):
        region = pool.region_tensor(component, layer)
        region.copy_(torch.from_numpy(pattern(component, layer, region.shape)))


def rows_from_a_host_pool_arrive_everywhere(world: World) -> None:
    """Rows copied out, and put back elsewhere: by their owner, and read by the others; loads are waited for."""
    layout = dsa_layout(6)
    pool = world.pool(layout)
    view = CacheView(pool)
    source, target = torch.tensor([7, 5 * PAGE + 1]), torch.tensor([9 * PAGE + 3, 2 * PAGE])
    copy = view.copy_out(source)
    span = ReadSpan([9, 2, 5], 140)
    pool.begin_forward([span])
    pool.read("latent", 5)
    view.copy_in(copy, target)
    loaded: set[tuple[str, int]] = set()

    def wait(component: str, layer: int) -> None:
        """The load ends only now."""
        if (component, layer) not in loaded:
            pool.wait_for_readers()
            loaded.add((component, layer))
            pool.region_tensor(component, layer)[9, :4] = layer

    for inside in (True, False):
        if not inside:
            pool.end_forward()
            view.wait_for_loads(wait)
            pool.begin_forward([span])
        for component, layer in layout.cells():
            about = layout.component(component)
            expected = pattern(component, layer, (16, about.page_bytes))
            put_rows(expected, layout, component, target.numpy(), rows_of(expected, layout, component, source.numpy()))
            if not inside:
                expected[9, :4] = layer
            came = rows_of(pool.read(component, layer), layout, component, slots_of(span, PAGE))
            assert np.array_equal(came, rows_of(expected, layout, component, slots_of(span, PAGE))), (component, layer)
    pool.end_forward()


def all_ranks_choose_the_same_reader(world: World) -> None:
    layout = dsa_layout(6)
    plan, me = LayerPlan.balanced(layout, ParallelSizes(cp=world.num_ranks)), RankCoordinates(cp=world.rank)
    owners = ShardOwners.of(layout, plan, me)
    for settings, kind in ((Settings(), "peer"), (Settings(pool_reader="broadcast"), "broadcast")):
        device = ThreadDevice() if world.has_lanes else world.gpu() if world.has_cuda else None
        reader, choice = open_reader(owners, layout, range(world.num_ranks), device=device, settings=settings)
        assert choice.kind == kind
        assert type(reader).__name__.lower().startswith(kind)
        pool = world.pool(layout, reader=reader, device=device)
        pool.begin_forward([ReadSpan([9, 2, 5], 140)])
        check_layer(pool, "latent", 5, ReadSpan([9, 2, 5], 140))
        pool.end_forward()


SCENARIOS: dict[str, Callable[[World], None]] = {
    one.__name__: one
    for one in (
        every_storage_format_arrives,
        rows_from_a_host_pool_arrive_everywhere,
        all_ranks_choose_the_same_reader,
    )
}
