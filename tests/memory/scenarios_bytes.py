"""Owns scenarios in which all ranks agree: what each must find in its reads, byte by byte. They run inside a world."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pdlink.layout import CacheLayout, LayerPlan, OwnedLayers, ParallelSizes, PlanKind, RankCoordinates
from pdlink.layout.components import Component, Field, index_k, latent
from pdlink.memory.broadcast_reader import BroadcastReader
from pdlink.memory.communicator import GroupCommunicator
from pdlink.memory.forward import ReadSpan
from pdlink.memory.owners import ShardOwners, owned_nbytes, scratch_nbytes
from pdlink.memory.peer_reader import PeerReader
from pdlink.memory.sharded_pool import LayerShardedPool
from tests.memory.rank_world import (
    PAGE,
    UNTOUCHED,
    World,
    all_fields,
    chunk_fields,
    dsa_layout,
    gqa_layout,
    owns,
    pattern,
    rows_of,
    slots_of,
)


def check_layer(pool: LayerShardedPool, component: str, layer: int, span: ReadSpan, salt: int = 0) -> None:
    """One read gives the owner's rows of the prefix, and scratch beyond them is as it was."""
    about = pool.layout.component(component)
    came = pool.read(component, layer)
    want = pattern(component, layer, (pool.num_pages, about.page_bytes), salt)
    live = slots_of(span, about.page_size)
    assert np.array_equal(rows_of(came, pool.layout, component, live), rows_of(want, pool.layout, component, live))
    # On devices pages travel whole.
    if not owns(pool, component, layer) and pool.device is None:
        every = np.arange(pool.num_pages * about.page_size)
        rest = rows_of(came, pool.layout, component, np.setdiff1d(every, live))
        assert (rest == UNTOUCHED).all(), f"{component} {layer}: rows that nobody asked for were moved"


def refill_scratch(pool: LayerShardedPool) -> None:
    for component in pool.layout.components:
        for buffer in pool.scratch_buffers(component.name):
            buffer.fill_(UNTOUCHED)


def every_layer_arrives(world: World) -> None:
    for layout in (dsa_layout(6), gqa_layout(5)):
        pool = world.pool(layout)
        size = layout.components[0].page_size
        for span in (ReadSpan([9, 2, 5, 7], 2 * size + 36 % size), ReadSpan([3], 1), ReadSpan([0, 15], 2 * size)):
            for component, layer in layout.cells():
                refill_scratch(pool)
                pool.begin_forward([span])
                check_layer(pool, component, layer, span)
                pool.end_forward()


def compacted_reads_say_where_pages_went(world: World) -> None:
    layout = dsa_layout(6)
    pool = world.pool(layout)
    span = ReadSpan([9, 2, 5], 2 * PAGE + 10)
    pool.begin_forward([span])
    for component, layer in layout.cells():
        want = pattern(component, layer, (16, layout.component(component).page_bytes))
        pages, remap = (one.cpu() for one in pool.read_compacted(component, layer))
        assert pages.shape == (3, layout.component(component).page_bytes)
        assert sorted(np.flatnonzero(remap.numpy() >= 0)) == [2, 5, 9]
        for page in (9, 2):
            assert np.array_equal(pages[remap[page]].numpy(), want[page])
        spread = np.zeros_like(want)
        spread[[2, 5, 9]] = pages[remap[[2, 5, 9]]].numpy()
        live = slots_of(span, PAGE)
        assert np.array_equal(rows_of(spread, layout, component, live), rows_of(want, layout, component, live))
    pool.end_forward()


def shared_pages_take_the_longest_span(world: World) -> None:
    layout = dsa_layout(4)
    pool = world.pool(layout)
    longest = ReadSpan([4, 8], PAGE + 50)
    pool.begin_forward([ReadSpan([4, 8], PAGE + 9), longest, ReadSpan([4], 3)])
    for component, layer in layout.cells():
        refill_before = pool.scratch_buffers(component)
        for buffer in refill_before:
            buffer.fill_(UNTOUCHED)
        check_layer(pool, component, layer, longest)
    pool.end_forward()


def bytes_moved_do_not_depend_on_pool_size(world: World) -> None:
    layout, span = dsa_layout(6), ReadSpan([9, 2, 5], 140)
    moved = []
    for num_pages in (16, 256):
        pool = world.pool(layout, num_pages)
        counts = {}
        pool.begin_forward([span])
        for component, layer in layout.cells():
            before = pool.stats.nbytes_moved
            pool.read(component, layer)
            counts[component, layer] = pool.stats.nbytes_moved - before
            about = layout.component(component)
            if world.kind == "broadcast":
                assert counts[component, layer] == pool.stats.nbytes_last_fetch
                assert 0 < counts[component, layer] - 3 * about.page_bytes <= 128
            else:
                per_token = sum(field.token_bytes for field in about.fields)
                mine = owns(pool, component, layer)
                rest = 12 * per_token if pool.device is None else about.page_bytes
                assert counts[component, layer] == (0 if mine else 2 * about.page_bytes + rest)
        again = pool.stats
        pool.read(*[key for key in layout.cells() if world.kind == "broadcast" or not owns(pool, *key)][-1])
        assert pool.stats.nbytes_moved == again.nbytes_moved
        assert pool.stats.scratch_hits == again.scratch_hits + 1
        pool.end_forward()
        assert pool.stats.fetches == sum(count > 0 for count in counts.values())
        moved.append(counts)
    assert moved[0] == moved[1]


def _damage(pool: LayerShardedPool, how: str, component: str, layer: int, expected: np.ndarray) -> None:
    """Change prefix rows of a layer in one of the ways there are, on all ranks alike, and in `expected`."""
    layout, mine = pool.layout, owns(pool, component, layer)
    about = layout.component(component)
    if how == "move":
        slots = torch.tensor([3, 130, 131]), torch.tensor([130, 131, 3])
        pool.move(component, *slots)
        put_rows(expected, layout, component, slots[1].numpy(), rows_of(expected, layout, component, slots[0].numpy()))
    elif how == "restore":
        data = pattern(component, layer, (2, about.page_bytes), salt=77)
        pool.restore(component, layer, [2, 0], torch.from_numpy(data) if mine else None)
        expected[[2, 0]] = data
    else:
        fields = chunk_fields(layout, component, 2, salt=5)
        slots = torch.tensor([130, 1])
        pool.write(component, layer, slots, fields)
        put_rows(expected, layout, component, slots.numpy(), all_fields(fields))


def put_rows(pages: np.ndarray, layout: CacheLayout, component: str, slots: np.ndarray, rows: np.ndarray) -> None:
    """The reverse of `rows_of`."""
    about = layout.component(component)
    for slot, data in zip(slots, rows, strict=True):
        (page, row), at = divmod(int(slot), about.page_size), 0
        for field in about.fields:
            for head in range(field.num_heads):
                start = field.offset + row * field.token_stride + head * field.head_stride
                pages[page, start : start + field.bytes_per_token] = data[at : at + field.bytes_per_token]
                at += field.bytes_per_token


def changed_history_is_read_again(world: World) -> None:
    """Read, change the owner's rows, read again: in one forward, and with the change between two."""
    layout = dsa_layout(6)
    span = ReadSpan([0, 1, 2], 3 * PAGE)
    live = slots_of(span, PAGE)
    for how in ("move", "restore", "write"):
        for inside in (True, False):
            pool = world.pool(layout)
            for component, layer in [("latent", 5), ("index_k", 5), ("latent", 0), ("index_k", 2)]:
                expected = pattern(component, layer, (16, layout.component(component).page_bytes))
                pool.begin_forward([span])
                pool.read(component, layer)
                if not inside:
                    pool.end_forward()
                before = expected.copy()
                _damage(pool, how, component, layer, expected)
                if not inside:
                    pool.begin_forward([span])
                came = rows_of(pool.read(component, layer), layout, component, live)
                assert np.array_equal(came, rows_of(expected, layout, component, live)), (how, inside, component)
                assert not np.array_equal(came, rows_of(before, layout, component, live))
                pool.end_forward()
                pool.wait_for_readers()
                if owns(pool, component, layer):
                    pool.region_tensor(component, layer).copy_(torch.from_numpy(before))
                for other in layout.component(component).layers:
                    if owns(pool, component, other):
                        data = pattern(component, other, (16, layout.component(component).page_bytes))
                        pool.region_tensor(component, other).copy_(torch.from_numpy(data))


class LateOwner(GroupCommunicator):
    """The owner's bytes come late: by then the others have long written their rows."""

    def broadcast(self, data: torch.Tensor, root: int, what: str) -> None:
        if self.rank == root:
            time.sleep(0.01)
        super().broadcast(data, root, what)


class LateGather(PeerReader):
    """Gathers start late: by then the owner has written its rows."""

    def fetch(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.01)
        super().fetch(*args, **kwargs)


def chunk_rows_survive_a_shared_page(world: World) -> None:
    """A prefix of 100 tokens and a chunk in the same page, written before or after the layer is read."""
    layouts = [(dsa_layout(6), 100), (gqa_layout(5), 11)]
    for layout, prefix in layouts:
        size = layout.components[0].page_size
        pages = [9, 2, 5, 7, 11, 1]
        for num_chunk in (1, 3 if size < 28 else 28):
            for order in ("read first", "write first", "write, lose it, read"):
                pool = world.pool(layout, communicator=LateOwner, peer=LateGather)
                span, chunk = ReadSpan(pages, prefix), ReadSpan(pages, prefix + num_chunk)
                new = slots_of(chunk, size, prefix)
                pool.begin_forward([span])
                for component, layer in layout.cells():
                    # Every rank writes bytes of its own: rows of the chunk must be local, not the owner's.
                    fields = chunk_fields(layout, component, num_chunk, salt=100 + world.rank)
                    if order == "read first":
                        pool.read(component, layer)
                    given = {name: rows.clone() for name, rows in fields.items()}
                    pool.write(component, layer, torch.from_numpy(new), given)
                    for rows in given.values():
                        rows.zero_()
                    if order == "write, lose it, read":
                        for other in layout.component(component).layers[:3]:
                            pool.read(component, other)
                    came = pool.read(component, layer)
                    assert np.array_equal(rows_of(came, layout, component, new), all_fields(fields)), order
                    live = slots_of(span, size)
                    want = pattern(component, layer, (16, layout.component(component).page_bytes))
                    assert np.array_equal(
                        rows_of(came, layout, component, live), rows_of(want, layout, component, live)
                    ), order
                    field = layout.component(component).fields[0]
                    mine = pool.rows(component, layer, field.name, torch.from_numpy(new))
                    assert torch.equal(mine.cpu(), fields[field.name])
                pool.end_forward()
                assert pool.nbytes_chunk_rows == 0


def two_shard_groups_in_one_world(world: World) -> None:
    """Groups that do not start at rank 0, that interleave, and one listed in another order than torch's."""
    span = ReadSpan([9, 2, 5], 140)
    layout = dsa_layout(5)
    for groups in ([[0, 2], [1, 3]], [[2, 0], [3, 1]], [[3, 0, 1], [2]]):
        salt = next(index for index, one in enumerate(groups) if world.rank in one)
        pool = world.pool(layout, groups=groups, salt=salt)
        pool.begin_forward([span])
        for component, layer in layout.cells():
            for buffer in pool.scratch_buffers(component):
                buffer.fill_(UNTOUCHED)
            check_layer(pool, component, layer, span, salt)
        pool.end_forward()


def a_rank_may_own_nothing(world: World) -> None:
    layout, span = dsa_layout(world.num_ranks - 1), ReadSpan([9, 2, 5], 140)
    pool = world.pool(layout)
    if world.rank == world.num_ranks - 1:
        assert pool.regions() == ()
        assert pool.nbytes_owned == 0
    else:
        assert {region.component for region in pool.regions()} >= {"latent"}
    pool.begin_forward([span])
    for component, layer in layout.cells():
        for buffer in pool.scratch_buffers(component):
            buffer.fill_(UNTOUCHED)
        check_layer(pool, component, layer, span)
    pool.end_forward()


def a_reader_serves_one_pool_after_another(world: World) -> None:
    layout, span = dsa_layout(6), ReadSpan([9, 2, 5], 140)
    plan, me = LayerPlan.balanced(layout, ParallelSizes(cp=world.num_ranks)), RankCoordinates(cp=world.rank)
    kind: type[BroadcastReader | PeerReader] = PeerReader if world.kind == "peer" else BroadcastReader
    reader = kind.open(ShardOwners.of(layout, plan, me), range(world.num_ranks))
    moved = []
    for salt in (1, 2):
        pool = world.pool(layout, salt=salt, reader=reader)
        pool.begin_forward([span])
        for component, layer in layout.cells():
            refill_scratch(pool)
            check_layer(pool, component, layer, span, salt)
        pool.end_forward()
        moved.append(pool.stats)
        pool.close()
    assert moved[0] == moved[1], "each pool counts its own"
    assert reader.nbytes_moved == 2 * moved[0].nbytes_moved
    assert reader.nbytes_staging >= (3 * PAGE * 656 if world.kind == "broadcast" and pool.device is None else 0)


def nothing_live_moves_nothing(world: World) -> None:
    layout = dsa_layout(6)
    pool = world.pool(layout)
    for spans in ([], [ReadSpan([], 0)], [ReadSpan([3], 0)]):
        pool.begin_forward(spans)
        for component, layer in layout.cells():
            pool.read(component, layer)
            pages, remap = pool.read_compacted(component, layer)
            assert len(pages) == 0
            assert (remap == -1).all()
        pool.end_forward()
    assert pool.stats.nbytes_moved == 0
    pool.begin_forward([ReadSpan([3], 5)])
    check_layer(pool, "latent", 5, ReadSpan([3], 5))
    pool.end_forward()


def page_groups_have_pages_of_their_own(world: World) -> None:
    index = index_k(16, range(4))
    index = Component("index_k", index.dtype, 16, index.page_bytes, index.layers, index.fields, page_group="index")
    layout = CacheLayout(4, (latent(PAGE, range(4), bytes_per_token=656), index))
    pool = world.pool(layout)
    spans = {"latent": ReadSpan([9, 2], 70), "index_k": ReadSpan([1, 4, 0, 15, 8], 70, "index")}
    pool.begin_forward(list(spans.values()))
    for component, layer in layout.cells():
        for buffer in pool.scratch_buffers(component):
            buffer.fill_(UNTOUCHED)
        check_layer(pool, component, layer, spans[component])
    pool.end_forward()


def _latent_everywhere(layout: CacheLayout, sizes: ParallelSizes) -> LayerPlan:
    split, whole = LayerPlan.balanced(layout, sizes), LayerPlan.balanced(layout, sizes, PlanKind.REPLICATED)
    owned: dict[RankCoordinates, OwnedLayers] = {
        rank: {**split.owned[rank], "latent": whole.owned[rank]["latent"]} for rank in sizes.ranks()
    }
    return LayerPlan(sizes, {"latent": PlanKind.REPLICATED, "index_k": PlanKind.SPLIT}, owned)


def a_replicated_component_is_never_moved(world: World) -> None:
    layout, span = dsa_layout(6), ReadSpan([9, 2, 5], 140)
    pool = world.pool(layout, plan=_latent_everywhere)
    pool.begin_forward([span])
    for layer in layout.component("latent").layers:
        assert pool.read("latent", layer).data_ptr() == pool.region_tensor("latent", layer).data_ptr()
    assert pool.stats.fetches == 0
    assert pool.scratch_buffers("latent") == ()
    for layer in layout.component("index_k").layers:
        for buffer in pool.scratch_buffers("index_k"):
            buffer.fill_(UNTOUCHED)
        check_layer(pool, "index_k", layer, span)
    pool.end_forward()


def memory_is_what_the_plan_says(world: World) -> None:
    for layout, slots in ((dsa_layout(6), 2), (gqa_layout(3), 3), (_one_layer_component(), 2)):
        plan, me = LayerPlan.balanced(layout, ParallelSizes(cp=world.num_ranks)), RankCoordinates(cp=world.rank)
        pool = world.pool(layout, 10, scratch_slots=slots)
        owners = ShardOwners.of(layout, plan, me)
        assert pool.nbytes_owned == owned_nbytes(layout, plan.owned[me], 10)
        assert pool.nbytes_owned == sum(region.nbytes for region in pool.regions())
        assert pool.nbytes_scratch == scratch_nbytes(layout, owners, world.rank, 10, slots)
        taken = [buffer for one in layout.components for buffer in pool.scratch_buffers(one.name)]
        assert pool.nbytes_scratch == sum(buffer.nbytes for buffer in taken)
        assert all(len(pool.scratch_buffers(one.name)) in (0, slots) for one in layout.components)


def _one_layer_component() -> CacheLayout:
    draft = Component("draft.latent", "bfloat16", PAGE, PAGE * 8, (0,), (Field("latent", 0, 8, 8),))
    return CacheLayout(6, (latent(PAGE, range(6), bytes_per_token=656), draft), num_draft_layers=1)


SCENARIOS: dict[str, Callable[[World], None]] = {
    one.__name__: one
    for one in (
        every_layer_arrives,
        compacted_reads_say_where_pages_went,
        shared_pages_take_the_longest_span,
        bytes_moved_do_not_depend_on_pool_size,
        changed_history_is_read_again,
        chunk_rows_survive_a_shared_page,
        two_shard_groups_in_one_world,
        a_rank_may_own_nothing,
        a_reader_serves_one_pool_after_another,
        nothing_live_moves_nothing,
        page_groups_have_pages_of_their_own,
        a_replicated_component_is_never_moved,
        memory_is_what_the_plan_says,
    )
}
