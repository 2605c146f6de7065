"""Layers and ranks that divide in no way: every number of layers over every number of ranks, along each axis."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from pdlink.layout import CacheLayout, DecodePlan, DecodeSizes, LayerPlan, ParallelSizes, PlanKind
from pdlink.layout.components import heads, index_k, latent
from tests.topology.quiet import Here
from tests.topology.site import SPARE_PAGES, Site
from tests.topology.strategies import Ask, Topology

LAYERS = (1, 3, 10, 61, 78)
RANKS = (1, 2, 3, 4, 8)
HEADS = 24


def mla(num_layers: int) -> CacheLayout:
    """Indexers on every third layer, as where layers share them."""
    indexed = range(0, num_layers, 3)
    parts = (latent(2, range(num_layers), bytes_per_token=3), index_k(2, indexed, key_bytes=2, scale_bytes=1))
    return CacheLayout(num_layers, parts)


def gqa(num_layers: int, tp: int) -> CacheLayout:
    layers = range(num_layers)
    parts = (heads(n, 2, layers, num_heads=HEADS // tp, head_bytes=1, dtype="x", total_heads=HEADS) for n in "kv")
    return CacheLayout(num_layers, tuple(parts))


def by_cp(num_layers: int, ranks: int) -> Topology:
    layout = mla(num_layers)
    plan = LayerPlan.balanced(layout, ParallelSizes(cp=ranks))
    return Topology((layout,) * plan.sizes.tp, plan, (layout,), DecodePlan.balanced(layout, DecodeSizes()))


def by_pp(num_layers: int, ranks: int) -> Topology:
    layout = mla(num_layers)
    decode = DecodePlan.balanced(layout, DecodeSizes(pp=3))
    return Topology((layout,), LayerPlan.balanced(layout, ParallelSizes(pp=ranks)), (layout,), decode)


def by_replicas(num_layers: int, ranks: int) -> Topology:
    layout = mla(num_layers)
    plan = LayerPlan.balanced(layout, ParallelSizes(cp=ranks), PlanKind.REPLICATED)
    return Topology((layout,), plan, (layout,) * 2, DecodePlan.balanced(layout, DecodeSizes(tp=2)))


def by_heads(num_layers: int, ranks: int) -> Topology:
    source, destination = gqa(num_layers, ranks), gqa(num_layers, 3)
    plan = LayerPlan.balanced(source, ParallelSizes(tp=ranks))
    return Topology((source,) * ranks, plan, (destination,) * 3, DecodePlan.balanced(destination, DecodeSizes(tp=3)))


@pytest.mark.parametrize("make", [by_cp, by_pp, by_replicas, by_heads])
@pytest.mark.parametrize(
    "num_layers", [pytest.param(one, marks=pytest.mark.slow if one in (61, 78) else ()) for one in LAYERS]
)
def test_any_number_of_layers_over_any_number_of_ranks(make: Callable[[int, int], Topology], num_layers: int) -> None:
    for ranks in RANKS:
        with contextlib.ExitStack() as stack:
            site = Site(stack, make(num_layers, ranks), 3 + SPARE_PAGES, Here)
            site.link()
            site.finish([site.begin("t", Ask(5, 0, 0, ranks))])


@pytest.mark.parametrize(("num_layers", "cp"), [(10, 4), (78, 8), (61, 3)])
def test_uneven_layers_are_exact(num_layers: int, cp: int) -> None:
    with contextlib.ExitStack() as stack:
        site = Site(stack, by_cp(num_layers, cp), 5 + SPARE_PAGES, Here)
        site.link()
        site.finish([site.begin("t", Ask(9, 0, 0, cp))])


def test_a_rank_that_owns_nothing_registers_nothing_and_is_released_all_the_same() -> None:
    """Three layers over four ranks: three contributors."""
    with contextlib.ExitStack() as stack:
        site = Site(stack, by_cp(3, 4), 3 + SPARE_PAGES, Here)
        site.link()
        assert [rank.owns_nothing for rank in site.info.ranks] == [False, False, False, True]
        assert site.info.ranks[3].regions == ()
        asked = site.begin("t", Ask(5, 0, 0, 2))
        site.finish([asked])
        assert len(asked.senders) == 4
        assert set(asked.receivers[0].result().num_bytes) == {one.worker_id for one in site.info.ranks[:3]}
