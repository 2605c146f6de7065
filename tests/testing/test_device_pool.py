"""Pools of tensors hold, check and report the same bytes as pools of host memory, on whatever device they lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pdlink.layout.components import CacheLayout, index_k, latent
from pdlink.layout.regions import MemoryKind
from pdlink.testing.device_pool import DevicePool
from pdlink.testing.pattern import SENTINEL, PatternPool, WrongPage

LAYOUT = CacheLayout(2, (latent(4, range(2), bytes_per_token=35), index_k(4, range(2), key_bytes=12, scale_bytes=1)))
OWNED = {"latent": (0, 1), "index_k": (1,)}
PAGES = {"kv": [6, 0, 3]}
START = {"kv": 5}


@pytest.fixture(params=[0, 20], ids=["dense", "with gaps"])
def pools(request):
    host = PatternPool(LAYOUT, OWNED, 8, page_gap=request.param)
    device = DevicePool(LAYOUT, OWNED, 8, torch.device("cpu"), page_gap=request.param)
    yield host, device
    host.close()
    device.close()


def test_regions_have_one_shape_and_say_where_they_lie(pools):
    host, device = pools
    for one, other in zip(host.regions, device.regions, strict=True):
        assert (one.component, one.layer, one.page_stride, one.page_bytes, one.num_pages) == (
            other.component,
            other.layer,
            other.page_stride,
            other.page_bytes,
            other.num_pages,
        )
        assert other.memory is MemoryKind.HOST
    raw = device._tensors["latent", 0]
    assert device.regions[0].base_address == raw.data_ptr() + raw.stride(0)


def test_the_same_requests_are_the_same_bytes(pools):
    for pool in pools:
        pool.fill("t", PAGES, START)
    host, device = pools
    for component, layers in OWNED.items():
        for layer in layers:
            assert np.array_equal(host.view(component, layer), device.view(component, layer))
            assert np.array_equal(host.heads(component, layer, 8), device.heads(component, layer, 8))
    assert device.find_wrong("t", PAGES, START) is None
    assert device.find_touched(PAGES) is None
    assert device.find_wrong("other", PAGES, START) == WrongPage("latent", 0, 6, 0)
    assert host.find_wrong("other", PAGES, START) == WrongPage("latent", 0, 6, 0)
    assert device.find_touched() == host.find_touched() == WrongPage("latent", 0, 0, 0)


@pytest.mark.parametrize("row", [0, 4, 9], ids=["guard before", "page 3", "guard after"])
def test_a_byte_written_from_elsewhere_is_found(pools, row):
    _, device = pools
    device._tensors["index_k", 1][row, 17] = 1
    assert device.find_touched() == WrongPage("index_k", 1, row - 1, 17)
    assert (device.find_touched({"kv": [3]}) is None) == (row == 4)


def test_bytes_in_a_gap_are_found_unless_the_pool_is_sparse():
    def pool(*, sparse):
        return DevicePool(LAYOUT, {"latent": (0,)}, 4, torch.device("cpu"), page_gap=64, sparse=sparse)

    dense = pool(sparse=False)
    dense._tensors["latent", 0][2, 150] = 1
    assert dense.find_touched({"kv": range(4)}) == WrongPage("latent", 0, 1, 150)
    sparse = pool(sparse=True)
    assert sparse._tensors["latent", 0].shape == (4, 140)
    assert sparse.regions[0].page_stride == 204
    sparse.fill("t", {"kv": [3]})
    assert sparse.find_wrong("t", {"kv": [3]}) is None
    assert sparse.find_touched({"kv": [3]}) is None
    assert sparse.find_touched() == WrongPage("latent", 0, 3, 0)


def test_wiped_pages_are_as_new(pools):
    for pool in pools:
        pool.fill("t", PAGES)
        pool.wipe()
        assert pool.find_touched() is None
        assert np.all(pool.view("latent", 1) == SENTINEL)


def test_a_view_is_a_copy_that_nobody_writes_by_mistake(pools):
    _, device = pools
    view = device.view("latent", 0)
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 1
    device.fill("t", PAGES)
    assert np.all(view == SENTINEL)
