"""Pairs that do not fit are refused in the handshake, with the reason, and nothing is written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pdlink.bootstrap.refusals import IncompatibleInstance
from pdlink.errors import LayoutError
from pdlink.layout import CacheLayout, DecodePlan, DecodeSizes, LayerPlan, ParallelSizes
from pdlink.layout.components import heads, latent
from tests.topology.quiet import Here
from tests.topology.site import Site
from tests.topology.strategies import Topology


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


def mla(page_size: int = 4) -> CacheLayout:
    return CacheLayout(2, (latent(page_size, range(2), bytes_per_token=8),))


def gqa(num_heads: int, total: int = 8) -> CacheLayout:
    return CacheLayout(2, (heads("k", 4, range(2), num_heads=num_heads, head_bytes=2, dtype="x", total_heads=total),))


def with_draft(layout: CacheLayout) -> CacheLayout:
    draft = replace(layout.components[0], name="draft.latent", layers=(0,))
    return replace(layout, components=(*layout.components, draft), num_draft_layers=1)


def make_site(
    stack: contextlib.ExitStack,
    prefill: CacheLayout,
    decode: CacheLayout,
    sizes: ParallelSizes | None = None,
    taken: DecodeSizes | None = None,
    **settings: object,
) -> Site:
    plan = LayerPlan.balanced(prefill, sizes or ParallelSizes())
    sizes_taken = taken or DecodeSizes()
    topology = Topology(
        (prefill,) * plan.sizes.tp, plan, (decode,) * sizes_taken.tp, DecodePlan.balanced(decode, sizes_taken)
    )
    return Site(stack, topology, 4, Here, **settings)


@pytest.mark.parametrize(
    ("prefill", "decode", "sizes", "taken", "settings", "field", "values"),
    [
        (mla(4), mla(8), None, None, {}, "latent.page_size", ("4", "8")),
        (gqa(8), gqa(6, 24), None, DecodeSizes(tp=4), {}, "k.heads", ("8", "24")),
        (mla(), with_draft(mla()), None, None, {"require_draft": True}, "draft.latent", ("absent", "required")),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_with_both_values(
    stack, prefill, decode, sizes, taken, settings, field, values
):
    site = make_site(stack, prefill, decode, sizes, taken, **settings)
    side = site.takers[0].worker._side
    mismatches = site.compare(side)
    if not mismatches:
        with pytest.raises(IncompatibleInstance) as caught:
            site.link()
        mismatches = caught.value.mismatches
    assert (mismatches[0].field, mismatches[0].prefill, mismatches[0].decode) == (field, *values)
    assert mismatches[0].fix
    assert not any(taker.landed.find_wrong() for taker in site.takers)


@pytest.mark.parametrize(
    ("prefill", "sizes", "words"),
    [
        (gqa(4), ParallelSizes(tp=3), "4 of 8 heads on tp rank 0; of tp=3 ranks the first 2 have 3"),
        (gqa(3), ParallelSizes(tp=3), "3 of 8 heads on tp rank 2"),
        (gqa(4, 0), ParallelSizes(tp=2), "give it total_heads"),
    ],
)
def test_prefill_ranks_whose_heads_do_not_come_out_do_not_start(stack, prefill, sizes, words):
    with pytest.raises(LayoutError, match=words):
        make_site(stack, prefill, gqa(8), sizes)


def test_a_decode_rank_whose_tokens_do_not_come_out_does_not_start(stack):
    with pytest.raises(LayoutError, match="dcp=2 does not divide page_size=3"):
        make_site(stack, mla(3), mla(3), None, DecodeSizes(tp=2, dcp=2))
