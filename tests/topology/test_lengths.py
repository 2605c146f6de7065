"""Requests of every length with every prefix that decode has, and very long ones."""

from __future__ import annotations

import contextlib

import pytest

from pdlink.layout import CacheLayout, DecodePlan, DecodeSizes, LayerPlan, ParallelSizes
from pdlink.layout.components import index_k, latent
from tests.topology.quiet import Here
from tests.topology.site import SPARE_PAGES, Site
from tests.topology.strategies import Ask, Topology

PAGE_SIZE = 4


def make_topology(page_size: int, dcp: int, token_bytes: int = 3) -> Topology:
    parts = (
        latent(page_size, range(3), bytes_per_token=token_bytes),
        index_k(page_size, (0, 2), key_bytes=2, scale_bytes=1),
    )
    layout = CacheLayout(3, parts)
    decode = DecodePlan.balanced(layout, DecodeSizes(tp=dcp, dcp=dcp))
    return Topology((layout,), LayerPlan.balanced(layout, ParallelSizes(pp=2, cp=2)), (layout,) * dcp, decode)


@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_any_prefix_of_any_length_leaves_the_rest_to_be_pulled(dcp: int) -> None:
    """From one token to some more than two pages, and from nothing held to all of it."""
    size = PAGE_SIZE * dcp
    lengths = range(1, 2 * size + 2) if dcp == 1 else [1, size + 1, 2 * size]
    with contextlib.ExitStack() as stack:
        site = Site(stack, make_topology(PAGE_SIZE, dcp), 2 * dcp + 1 + SPARE_PAGES, Here)
        site.link()
        for num_tokens in lengths:
            for prefix in range(0, num_tokens + 1, 1 if dcp < 4 else 3):
                name = f"{num_tokens}-{prefix}"
                site.finish([site.begin(name, Ask(num_tokens, prefix, 0, num_tokens * 100 + prefix))])


@pytest.mark.parametrize("num_tokens", [1 << 20, pytest.param((1 << 20) - 63, marks=pytest.mark.slow)])
def test_a_request_of_a_million_tokens_arrives_whole(num_tokens: int) -> None:
    with contextlib.ExitStack() as stack:
        site = Site(stack, make_topology(64, 1, token_bytes=1), (1 << 14) + SPARE_PAGES, Here)
        site.link()
        site.finish([site.begin("long", Ask(num_tokens, 0, 0, 7))])


@pytest.mark.slow
def test_a_request_of_a_million_tokens_is_shared_by_ranks() -> None:
    with contextlib.ExitStack() as stack:
        site = Site(stack, make_topology(64, 8, token_bytes=1), (1 << 14) + SPARE_PAGES, Here)
        site.link()
        site.finish([site.begin("long", Ask((1 << 20) - 1, 64 * 8 + 1, 0, 7))])
