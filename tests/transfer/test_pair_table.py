"""The overview of a request: nothing is counted twice, and every rank of both sides is in it."""

from __future__ import annotations

import pytest

from pdlink.errors import PlanError
from pdlink.layout import CacheLayout, DecodePlan, DecodeRank, DecodeSizes, LayerPlan, ParallelSizes, RankCoordinates
from pdlink.layout.components import heads, index_k, latent
from pdlink.layout.layer_plan import balanced_ranges
from pdlink.transfer.pair_table import PairTable, tabulate

MLA = CacheLayout(10, (latent(16, range(10), bytes_per_token=64), index_k(16, range(0, 10, 3))))


def gqa(num_heads: int, total: int) -> CacheLayout:
    made = (heads(name, 16, range(4), num_heads=num_heads, head_bytes=8, dtype="x", total_heads=total) for name in "kv")
    return CacheLayout(4, tuple(made))


def mla_table(prefill: ParallelSizes, decode: DecodeSizes, num_tokens: int = 40) -> PairTable:
    plan = LayerPlan.balanced(MLA, prefill)
    return tabulate([MLA], plan, DecodePlan.balanced(MLA, decode), lambda rank: MLA, num_tokens)


def test_every_decode_rank_takes_every_layer_of_a_cache_without_heads():
    table = mla_table(ParallelSizes(pp=2, cp=2), DecodeSizes(tp=3))
    whole = 3 * 16 * (10 * 64 + 4 * 132)  # pages, tokens, and bytes of a token in all layers
    assert table.num_pages == {"kv": 3}
    assert table.nbytes_of_reader == {DecodeRank(tp=tp): whole for tp in range(3)}
    assert table.nbytes == sum(table.nbytes_of_source.values()) == 3 * whole
    assert table.num_descriptors == 3 * 3 * 14
    assert [pull.layers["latent"] for pull, _ in table.alike()] == [(0, 1, 2), (3, 4), (5, 6, 7), (8, 9)]
    assert [pull.layers.get("index_k") for pull, _ in table.alike()] == [(0,), (3,), (6,), (9,)]
    assert all(readers == tuple(DecodeRank(tp=tp) for tp in range(3)) for _, readers in table.alike())
    assert all(pull.heads == {} for pull in table.pulls)


def test_a_stage_of_decode_takes_its_layers_only():
    table = mla_table(ParallelSizes(cp=2), DecodeSizes(pp=5))
    assert [str(pull.reader) for pull in table.pulls if pull.source == RankCoordinates(cp=0)] == [
        "dp0.pp0.tp0", "dp0.pp1.tp0", "dp0.pp2.tp0",
    ]  # fmt: skip
    assert sum(len(pull.layers["latent"]) for pull in table.pulls) == 10


def test_ranks_without_layers_are_counted_with_nothing():
    table = mla_table(ParallelSizes(cp=20), DecodeSizes(pp=20))
    assert list(table.nbytes_of_source.values()).count(0) == list(table.nbytes_of_reader.values()).count(0) == 10
    assert table.source_imbalance == pytest.approx(20 * (64 + 132) / (10 * 64 + 4 * 132))


def test_heads_that_tp_does_not_divide_are_taken_unevenly():
    counts = [len(one) for one in balanced_ranges(3, 2)]
    sizes = DecodeSizes(tp=2)
    table = tabulate(
        [source := gqa(3, 3)],
        LayerPlan.balanced(source, ParallelSizes(cp=2)),
        DecodePlan.balanced(source, sizes),
        lambda rank: gqa(counts[rank.tp], 3),
        16,
    )
    assert [pull.heads for pull in table.pulls if pull.source.cp == 0] == [
        {"k": (0, 2), "v": (0, 2)},
        {"k": (2, 3), "v": (2, 3)},
    ]
    assert list(table.nbytes_of_reader.values()) == [2 * 4 * 16 * 8 * count for count in counts]
    assert table.reader_imbalance == pytest.approx(4 / 3)
    assert table.source_imbalance == 1
    # A token of k, and of v, in each layer: heads lie inside a token's row.
    assert table.num_descriptors == 2 * 2 * 4 * 16


def test_heads_that_prefills_tp_does_not_divide_are_given_unevenly():
    counts = [len(one) for one in balanced_ranges(5, 2)]
    sources = [gqa(count, 5) for count in counts]
    plan = LayerPlan.balanced(sources[0], ParallelSizes(tp=2))
    decode = DecodePlan.balanced(gqa(5, 5), DecodeSizes())
    table = tabulate(sources, plan, decode, lambda rank: gqa(5, 5), 16)
    assert [pull.heads["k"] for pull in table.pulls] == [(0, 3), (3, 5)]
    assert list(table.nbytes_of_source.values()) == [2 * 4 * 16 * 8 * count for count in counts]


def test_what_does_not_fit_is_refused_with_the_reason():
    source = gqa(3, 3)
    plan, decode = LayerPlan.balanced(source, ParallelSizes()), DecodePlan.balanced(source, DecodeSizes())
    with pytest.raises(PlanError, match="model_heads=3 on prefill and 4 on decode"):
        tabulate([source], plan, decode, lambda rank: gqa(4, 4), 16)
