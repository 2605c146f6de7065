"""A pool whose layers are all local: what it allocates, refuses, moves, backs up and gives back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pdlink.backends import shm
from pdlink.backends.shm import attach, locate
from pdlink.errors import BackendUnavailable, LayoutError, StateError
from pdlink.layout import CacheLayout, Component, check_region
from pdlink.layout.components import index_k, latent
from pdlink.layout.regions import MemoryKind
from pdlink.memory.chunk_rows import ChunkRows
from pdlink.memory.sharded_pool import LayerShardedPool, ReadSpan

LAYOUT = CacheLayout(3, (latent(64, range(3), bytes_per_token=656), index_k(64, (0, 2))))
OWNED = {"latent": (0, 1, 2), "index_k": (0, 2)}


@pytest.fixture
def pool() -> Iterator[LayerShardedPool]:
    one = LayerShardedPool(LAYOUT, OWNED, 8)
    random = np.random.default_rng(1)
    for component, layer in LAYOUT.cells():
        region = one.region_tensor(component, layer)
        region.copy_(torch.from_numpy(random.integers(0, 256, tuple(region.shape), dtype=np.uint8)))
    yield one
    one.close()


def test_regions_are_shared_memory_that_holds_the_tensors(pool: LayerShardedPool) -> None:
    assert [(region.component, region.layer) for region in pool.regions()] == list(LAYOUT.cells())
    assert {(region.memory, region.device) for region in pool.regions()} == {(MemoryKind.HOST, 0)}
    for region in pool.regions():
        check_region(region, LAYOUT)
        tensor = pool.region_tensor(region.component, region.layer)
        assert tensor.data_ptr() == region.base_address
        assert region.is_dense
        assert region.num_pages == 8
        where = locate(region.base_address, region.nbytes)
        assert where is not None
        attached = attach(where.name, where.nbytes)
        shared = attached.array[where.offset : where.offset + region.nbytes]
        assert np.array_equal(shared, tensor.numpy().reshape(-1))
        del shared
        attached.close()


def test_only_owned_layers_take_memory() -> None:
    pool = LayerShardedPool(LAYOUT, {"latent": (1,), "index_k": ()}, 8)
    try:
        assert pool.nbytes_owned == 8 * 64 * 656
        assert pool.nbytes_scratch == 0
        assert len(pool.regions()) == 1
        for component, layer in (("latent", 0), ("index_k", 0)):
            with pytest.raises(LayoutError, match=f"does not own {component!r} layer {layer}"):
                pool.region_tensor(component, layer)
            with pytest.raises(LayoutError, match="does not own"):
                pool.read(component, layer)
    finally:
        pool.close()


def test_a_new_pool_is_zero() -> None:
    pool = LayerShardedPool(LAYOUT, OWNED, 2)
    assert not any(pool.region_tensor(*key).any() for key in LAYOUT.cells())
    pool.close()


def test_reads_are_the_owned_memory_itself(pool: LayerShardedPool) -> None:
    pool.begin_forward([ReadSpan([3, 1], 100)], [("latent", 0)])
    for component, layer in LAYOUT.cells():
        assert pool.read(component, layer).data_ptr() == pool.region_tensor(component, layer).data_ptr()
    pages, remap = pool.read_compacted("latent", 1)
    assert torch.equal(pages[remap[[3, 1]]], pool.region_tensor("latent", 1)[[3, 1]])
    assert remap.tolist().count(-1) == 6
    pool.end_forward()
    assert pool.stats.reads == 6
    assert pool.stats.nbytes_moved == 0


def test_rows_written_are_rows_read(pool: LayerShardedPool) -> None:
    slots = torch.tensor([3, 130, 511])
    fields = {"key": torch.arange(3 * 128).to(torch.uint8).view(3, 128), "scale": torch.full((3, 4), 7).to(torch.uint8)}
    others = pool.region_tensor("index_k", 0).clone()
    pool.write("index_k", 2, slots, fields)
    for name, rows in fields.items():
        assert torch.equal(pool.rows("index_k", 2, name, slots), rows)
    assert torch.equal(pool.region_tensor("index_k", 0), others)


def test_a_move_without_a_name_moves_every_component_and_layer(pool: LayerShardedPool) -> None:
    source, target = torch.tensor([3, 130]), torch.tensor([130, 64])
    before = {
        (component, layer, field.name): pool.rows(component, layer, field.name, source)
        for component, layer in LAYOUT.cells()
        for field in LAYOUT.component(component).fields
    }
    pool.move(None, source, target)
    for (component, layer, field), rows in before.items():
        assert torch.equal(pool.rows(component, layer, field, target), rows)


def test_a_move_by_name_leaves_other_components(pool: LayerShardedPool) -> None:
    before = {key: pool.region_tensor(*key).clone() for key in LAYOUT.cells()}
    pool.move("index_k", torch.tensor([3]), torch.tensor([130]))
    for key, pages in before.items():
        assert torch.equal(pool.region_tensor(*key), pages) == (key[0] == "latent")


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ([1], [1, 2], "as many sources as distinct targets"),
        ([1, 2], [5, 5], "1 distinct of 2"),
        ([512], [1], "outside the 512 slots"),
        ([1], [-1], "outside the 512 slots"),
    ],
)
def test_a_move_that_cannot_be_changes_nothing(
    pool: LayerShardedPool, source: list[int], target: list[int], words: str
) -> None:
    before = pool.region_tensor("latent", 0).clone()
    with pytest.raises(LayoutError, match=words):
        pool.move(None, torch.tensor(source), torch.tensor(target))
    assert torch.equal(pool.region_tensor("latent", 0), before)


def test_a_move_over_several_page_groups_needs_a_name() -> None:
    one = index_k(64, (0, 2))
    index = Component(one.name, one.dtype, 64, one.page_bytes, one.layers, one.fields, page_group="index")
    pool = LayerShardedPool(CacheLayout(3, (LAYOUT.components[0], index)), OWNED, 8)
    try:
        with pytest.raises(LayoutError, match="name the component"):
            pool.move(None, torch.tensor([1]), torch.tensor([2]))
        pool.move("index_k", torch.tensor([1]), torch.tensor([2]))
    finally:
        pool.close()


def test_what_was_backed_up_can_be_restored_elsewhere(pool: LayerShardedPool) -> None:
    kept = pool.backup("index_k", 2, [5, 0])
    assert torch.equal(kept, pool.region_tensor("index_k", 2)[[5, 0]])
    pool.region_tensor("index_k", 2).zero_()
    assert kept.any(), "a backup is a copy"
    pool.restore("index_k", 2, [1, 7], kept)
    assert torch.equal(pool.region_tensor("index_k", 2)[[1, 7]], kept)
    assert not pool.region_tensor("index_k", 2)[[0, 2, 3, 4, 5, 6]].any()


def test_a_restore_that_cannot_be_is_refused(pool: LayerShardedPool) -> None:
    kept = pool.backup("latent", 2, [5, 0])
    with pytest.raises(LayoutError, match="its owner gives data"):
        pool.restore("latent", 2, [5, 0], None)
    with pytest.raises(LayoutError, match=r"takes uint8 \[1, 41984\]"):
        pool.restore("latent", 2, [5], kept)
    with pytest.raises(LayoutError, match="page 8 is outside"):
        pool.restore("latent", 2, [5, 8], kept)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"key": torch.zeros((2, 128), dtype=torch.uint8)}, r"uint8 \[1, 128\]"),
        ({"value": torch.zeros((1, 128), dtype=torch.uint8)}, "no field 'value'; it has key, scale"),
        ({"key": torch.zeros((1, 128))}, "float32"),
    ],
)
def test_a_write_that_cannot_be_changes_nothing(
    pool: LayerShardedPool, fields: dict[str, torch.Tensor], words: str
) -> None:
    before = pool.region_tensor("index_k", 0).clone()
    good = {"scale": torch.ones((1, 4), dtype=torch.uint8)}
    with pytest.raises(LayoutError, match=words):
        pool.write("index_k", 0, torch.tensor([9]), {**good, **fields})
    assert torch.equal(pool.region_tensor("index_k", 0), before)


def test_layers_and_components_that_are_not_there_are_named(pool: LayerShardedPool) -> None:
    with pytest.raises(LayoutError, match="'index_k' has no layer 1"):
        pool.read("index_k", 1)
    with pytest.raises(LayoutError, match="no component 'v'"):
        pool.read("v", 0)
    with pytest.raises(LayoutError, match="not distinct layers"):
        LayerShardedPool(LAYOUT, {"index_k": (0, 1)}, 8)
    with pytest.raises(LayoutError, match="num_pages of at least 1, got 0"):
        LayerShardedPool(LAYOUT, OWNED, 0)


def test_a_pool_that_does_not_fit_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for the first component, not for the second."""
    before = {path.name for path in Path(shm.SHM_DIR).iterdir()}
    monkeypatch.setattr(shm, "_free_bytes", lambda: 8 * 64 * 656 * 2)
    with pytest.raises(BackendUnavailable, match="are wanted"):
        LayerShardedPool(LAYOUT, {"index_k": (0,), "latent": (0, 1, 2)}, 8)
    gc.collect()
    mine = {path.name for path in Path(shm.SHM_DIR).iterdir()} - before
    assert not [name for name in mine if locate_name(name)]


def locate_name(name: str) -> bool:
    return name in Path("/proc/self/maps").read_text()


def test_close_twice_gives_the_memory_back_once(pool: LayerShardedPool) -> None:
    address = pool.regions()[0].base_address
    held = pool.region_tensor("latent", 0)
    pool.close()
    pool.close()
    assert locate(address, 1) is None
    assert pool.regions() == ()
    assert held.any(), "a tensor that is still held keeps its memory"
    with pytest.raises(StateError, match="closed"):
        pool.region_tensor("latent", 0)


def test_kept_rows_are_copies_that_a_change_on_the_owner_replaces() -> None:
    rows, key = ChunkRows(), ("latent", 4)
    data = torch.arange(12, dtype=torch.uint8).view(3, 4)
    rows.keep(key, torch.tensor([7, 8, 9]), {"latent": data})
    rows.keep(key, torch.tensor([], dtype=torch.int64), {"latent": data[:0]})
    data.zero_()
    assert rows.nbytes == 12
    rows.forget(key, torch.tensor([8, 100]))
    rows.forget(("latent", 5), torch.tensor([7]))
    kept = list(rows.of(key))
    assert [slots.tolist() for slots, _ in kept] == [[7, 9]]
    assert kept[0][1]["latent"].tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    rows.forget(key, torch.tensor([7, 9]))
    assert not list(rows.of(key))
    assert rows.nbytes == 0
