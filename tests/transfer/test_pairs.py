"""Who pulls what from whom: every part of every layer once, from somebody who has it, and no replica more than its
share.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlink.errors import PlanError
from pdlink.layout import CacheLayout, DecodePlan, DecodeSizes, LayerPlan, ParallelSizes, Part, PlanKind
from pdlink.layout.components import heads, index_k, latent
from pdlink.transfer.pairs import Share, pair
from pdlink.transfer.routes import Holder, find_routes

HEADS = 8


def mla(num_layers: int, indexed: range | tuple[int, ...] = ()) -> CacheLayout:
    parts = (latent(16, range(num_layers), bytes_per_token=64), index_k(16, indexed))
    return CacheLayout(num_layers, parts if indexed else parts[:1])


def gqa(num_layers: int, tp: int) -> CacheLayout:
    each = max(1, HEADS // tp)
    made = (
        heads(name, 16, range(num_layers), num_heads=each, head_bytes=16, dtype="bfloat16", total_heads=HEADS)
        for name in "kv"
    )
    return CacheLayout(num_layers, tuple(made))


@settings(max_examples=40)
@given(
    st.sampled_from([1, 3, 10]),
    st.tuples(*(st.sampled_from([1, 2, 3, 4]) for _ in range(2)), st.sampled_from([1, 2, 4, 8, 16])),
    st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4, 8, 16])),
    st.sampled_from(PlanKind),
    st.booleans(),
)
def test_each_decode_rank_gets_every_head_of_each_of_its_layers_once(num_layers, prefill, decode, kind, is_gqa):
    pp, cp, tp = prefill
    source = gqa(num_layers, tp) if is_gqa else mla(num_layers, range(0, num_layers, 2))
    destination = gqa(num_layers, decode[1]) if is_gqa else source
    plan = LayerPlan.balanced(source, ParallelSizes(pp=pp, cp=cp, tp=tp), kind)
    taken = DecodePlan.balanced(destination, DecodeSizes(pp=decode[0], tp=decode[1]))
    shares = pair(source, plan, destination, taken)
    for reader, owned in taken.owned.items():
        part = taken.place(reader).parts(destination)
        got: Counter[tuple[str, int, int]] = Counter()
        for share in shares:
            if share.reader == reader:
                for route in share.routes:
                    assert route.layer in plan.owned[share.source][route.component]
                    common = set(route.part.heads(HEADS)) & set(part[route.component].heads(HEADS))
                    got.update((route.component, route.layer, head) for head in common)
        wanted = {
            (name, layer, head) for name, ids in owned.items() for layer in ids for head in part[name].heads(HEADS)
        }
        assert got == Counter(dict.fromkeys(wanted, 1))
        total = sum(one.nbytes({"latent": 3, "index_k": 3, "k": 3, "v": 3}) for one in shares if one.reader == reader)
        nbytes = {one.name: one.page_bytes for one in destination.components}
        assert total == 3 * sum(nbytes[name] * len(ids) for name, ids in owned.items())


def loads(shares: tuple[Share, ...], num_pages: dict[str, int]) -> Counter[object]:
    load: Counter[object] = Counter()
    for one in shares:
        load[one.source] += one.nbytes(num_pages)
    return load


@pytest.mark.parametrize("sizes", [ParallelSizes(tp=4), ParallelSizes(cp=4), ParallelSizes(cp=2, tp=2)])
@pytest.mark.parametrize("num_layers", [1, 3, 10, 61, 78])
def test_replicas_share_the_load(sizes, num_layers):
    """No rank is asked for more than its share by more than one layer of a reader; nobody is left to idle."""
    layout = mla(num_layers, tuple(range(0, num_layers, 4)))
    shares = pair(
        layout,
        LayerPlan.balanced(layout, sizes, PlanKind.REPLICATED),
        layout,
        DecodePlan.balanced(layout, DecodeSizes(tp=8)),
    )
    load = loads(shares, {"latent": 1, "index_k": 1})
    largest = max(one.page_bytes for one in layout.components)
    assert len(load) == 4
    assert max(load.values()) - min(load.values()) <= 8 * largest
    if num_layers == 1:
        assert max(load.values()) - min(load.values()) <= 2 * largest, "readers begin with different replicas"


def test_what_has_one_owner_counts_when_the_rest_is_spread():
    layout = mla(4)
    holders = [Holder("a", {"latent": (0, 1, 2, 3)}), Holder("b", {"latent": (2, 3)})]
    routes = find_routes(layout, holders, layout, {"latent": (0, 1, 2, 3)})
    assert [one.holder for one in routes] == [0, 0, 1, 1]


def test_the_same_question_has_the_same_answer():
    layout = gqa(10, 2)
    holders = [
        Holder(str(n), {"k": range(10), "v": range(10)}, {"k": Part(n // 2, 2), "v": Part(n // 2, 2)}) for n in range(4)
    ]
    wanted = {"k": tuple(range(10)), "v": tuple(range(10))}
    again = [[one.holder for one in find_routes(layout, holders, gqa(10, 1), wanted, turn=3)] for _ in range(2)]
    assert again[0] == again[1]


def test_heads_that_nobody_holds_are_named():
    holders = [Holder("a", {"k": (0,), "v": (0,)}, {"k": Part(1, 2), "v": Part(1, 2)})]
    with pytest.raises(PlanError, match="'k' layer 0: the prefill ranks hold 4 of the 8 heads from 0"):
        find_routes(gqa(1, 2), holders, gqa(1, 1), {"k": (0,)})


def test_a_layer_that_nobody_holds_is_named():
    with pytest.raises(PlanError, match="'latent' layer 1 has no owner on the prefill side"):
        find_routes(mla(2), [Holder("a", {"latent": (0,)})], mla(2), {"latent": (0, 1)})


def test_a_component_that_prefill_lacks_is_named():
    with pytest.raises(PlanError, match="prefill: no component 'index_k'"):
        find_routes(mla(2), [Holder("a", {"latent": (0, 1)})], mla(2, (0, 1)), {"index_k": (0,)})


def test_tokens_are_spread_over_readers():
    layout = mla(2)
    decode = DecodePlan.balanced(layout, DecodeSizes(tp=4, dcp=4))
    shares = pair(layout, LayerPlan.balanced(layout, ParallelSizes(cp=2)), layout, decode)
    assert len(shares) == 8
    assert {one.nbytes({"latent": 4}) for one in shares} == {4 * 4 * 64}
    assert {one.num_descriptors({"latent": 4}) for one in shares} == {4 * 4}
    assert shares[0].layers == {"latent": (0,)}
