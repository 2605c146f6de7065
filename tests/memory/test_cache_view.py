"""The cache as an engine sees it: shapes and element types, owned buffers, copies to host and back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pdlink.errors import LayoutError
from pdlink.layout import CacheLayout, LayerPlan, ParallelSizes, RankCoordinates
from pdlink.layout.components import heads, index_k, latent
from pdlink.layout.footprint import measure
from pdlink.layout.models import MODELS
from pdlink.memory.cache_view import CacheView
from pdlink.memory.sharded_pool import LayerShardedPool
from tests.memory.rank_world import gqa_layout, rows_of

PAGE = 64
NUM_PAGES = 6
MLA = CacheLayout(3, (latent(PAGE, range(3), bytes_per_token=1152), index_k(PAGE, (0, 2))))
OWNED = {"latent": (1, 2), "index_k": (2,)}


def filled(layout: CacheLayout, owned: dict[str, tuple[int, ...]]) -> LayerShardedPool:
    pool = LayerShardedPool(layout, owned, NUM_PAGES)
    random = np.random.default_rng(3)
    for name, layers in owned.items():
        for layer in layers:
            region = pool.region_tensor(name, layer)
            region.copy_(torch.from_numpy(random.integers(0, 256, tuple(region.shape), dtype=np.uint8)))
    return pool


@pytest.fixture
def pool() -> Iterator[LayerShardedPool]:
    one = filled(MLA, OWNED)
    yield one
    one.close()


def test_key_and_value_buffers_are_views_by_token(pool: LayerShardedPool) -> None:
    view = CacheView(pool, {"latent": torch.bfloat16})
    key, value = view.key_buffer(1), view.value_buffer(1, 512)
    assert (key.shape, key.dtype) == ((NUM_PAGES * PAGE, 1, 576), torch.bfloat16)
    assert value.shape == (NUM_PAGES * PAGE, 1, 512)
    assert key.data_ptr() == value.data_ptr() == pool.region_tensor("latent", 1).data_ptr()
    token = key[2 * PAGE + 5, 0].view(torch.uint8).numpy()
    assert np.array_equal(token, rows_of(pool.region_tensor("latent", 1), MLA, "latent", [2 * PAGE + 5])[0])
    assert view.index_buffer(2).shape == (NUM_PAGES, PAGE * 132)


def test_heads_have_buffers_of_their_own() -> None:
    layout = gqa_layout(2)
    pool = filled(layout, {"k": (0, 1), "v": (0, 1)})
    view = CacheView(pool, {"k": torch.bfloat16, "v": torch.bfloat16})
    assert view.key_buffer(0).shape == view.value_buffer(0).shape == (NUM_PAGES * 7, 3, 5)
    assert view.value_buffer(1).data_ptr() == pool.region_tensor("v", 1).data_ptr()
    pool.close()


def test_buffer_tables_name_owned_buffers_only(pool: LayerShardedPool) -> None:
    view = CacheView(pool)
    table = view.buffers_of("latent")
    assert table.layers == (1, 2)
    assert table.addresses == tuple(pool.region_tensor("latent", layer).data_ptr() for layer in (1, 2))
    assert set(table.page_bytes) == {PAGE * 1152}
    assert set(table.nbytes) == {NUM_PAGES * PAGE * 1152}
    assert view.nbytes == sum(table.nbytes) + sum(view.buffers_of("index_k").nbytes)


def test_a_rank_that_owns_nothing_has_empty_tables() -> None:
    pool = LayerShardedPool(MLA, {}, NUM_PAGES)
    view = CacheView(pool)
    assert view.buffers_of("latent").layers == ()
    assert view.nbytes == 0
    copy = view.copy_out(torch.tensor([3, 70]))
    assert copy.nbytes == 0
    view.copy_in(copy, torch.tensor([9, 8]))
    pool.close()


def test_rows_go_out_to_host_and_come_back_elsewhere(pool: LayerShardedPool) -> None:
    view = CacheView(pool)
    source, target = np.array([3, 64, 130, 7]), np.array([200, 5, 320, 130])
    before = {key: rows_of(pool.region_tensor(*key), MLA, key[0], source) for key in (("latent", 1), ("index_k", 2))}
    copy = view.copy_out(torch.from_numpy(source))
    assert copy.nbytes == 4 * (2 * 1152 + 132)
    for layers in OWNED.items():
        for layer in layers[1]:
            pool.region_tensor(layers[0], layer).zero_()
    view.copy_in(copy, torch.from_numpy(target))
    for key, rows in before.items():
        region = pool.region_tensor(*key)
        assert np.array_equal(rows_of(region, MLA, key[0], target), rows)
        assert int((region != 0).sum()) == int((rows != 0).sum())


def test_copies_must_fit(pool: LayerShardedPool) -> None:
    view = CacheView(pool)
    copy = view.copy_out(torch.tensor([1, 2]), ["latent"])
    with pytest.raises(LayoutError, match="a copy of 2 rows cannot be put at 3 slots"):
        view.copy_in(copy, torch.tensor([1, 2, 3]))
    with pytest.raises(LayoutError, match="gives fields"):
        pool.restore_rows("latent", 1, torch.tensor([1]), None)
    with pytest.raises(LayoutError, match="no multiple"):
        CacheView(LayerShardedPool(gqa_layout(1), {}, 1), {"k": torch.float32})


def test_page_shaped_components_are_not_handed_out_by_token(pool: LayerShardedPool) -> None:
    with pytest.raises(LayoutError, match="read it by pages"):
        CacheView(pool).buffer("index_k", 2)


def test_a_read_waits_for_the_load_of_that_layer(pool: LayerShardedPool) -> None:
    waited: list[tuple[str, int]] = []
    view = CacheView(pool)
    view.wait_for_loads(lambda component, layer: waited.append((component, layer)))
    view.key_buffer(2)
    view.index_buffer(2)
    assert waited == [("latent", 2), ("index_k", 2)]
    view.wait_for_loads(None)
    view.key_buffer(1)
    assert len(waited) == 2


@pytest.mark.parametrize(("page_size", "dtype"), [(64, "bfloat16"), (64, "float8_e4m3fn"), (1, "bfloat16")])
def test_the_memory_of_a_rank_is_what_the_plan_predicts(page_size: int, dtype: str) -> None:
    layout = MODELS["glm-5.2"].own_layout(page_size, dtype)
    for sizes in (ParallelSizes(cp=4), ParallelSizes(pp=2, cp=3)):
        plan = LayerPlan.balanced(layout, sizes)
        tokens = 2 * page_size + 1
        footprint = measure([layout], plan, tokens)
        rank = next(one for one in footprint.ranks if one.rank == RankCoordinates(cp=1))
        pool = LayerShardedPool(layout, plan.owned[rank.rank], footprint.num_pages["kv"])
        assert CacheView(pool).nbytes == rank.owned_bytes
        pool.close()


def test_plain_heads_of_any_size_are_handed_out_whole() -> None:
    layout = CacheLayout(1, (heads("k", 16, [0], num_heads=8, head_bytes=256, dtype="bfloat16"),))
    pool = filled(layout, {"k": (0,)})
    assert CacheView(pool, {"k": torch.bfloat16}).key_buffer(0).shape == (NUM_PAGES * 16, 8, 128)
    pool.close()
