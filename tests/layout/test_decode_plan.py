"""Decode ranks and what they hold."""

from __future__ import annotations

import pytest

from pdlink.errors import LayoutError
from pdlink.layout import CacheLayout, DecodePlace, DecodePlan, DecodeRank, DecodeSizes, Part
from pdlink.layout.components import heads, latent

LAYOUT = CacheLayout(10, (latent(64, range(10), bytes_per_token=8),))


def test_stages_are_balanced_and_tp_ranks_of_one_hold_the_same():
    plan = DecodePlan.balanced(LAYOUT, DecodeSizes(dp=2, pp=3, tp=2))
    assert len(plan.owned) == 12
    for rank, owned in plan.owned.items():
        assert owned["latent"] == ((0, 1, 2, 3), (4, 5, 6), (7, 8, 9))[rank.pp]


def test_stages_may_begin_anywhere():
    plan = DecodePlan.balanced(LAYOUT, DecodeSizes(pp=2), stage_starts=(0, 9))
    assert [one["latent"] for one in plan.owned.values()] == [tuple(range(9)), (9,)]


def test_readers_of_a_request_are_the_ranks_of_a_dp_group():
    sizes = DecodeSizes(dp=2, pp=2, tp=4)
    places = [DecodePlace(sizes, rank) for rank in sizes.ranks()]
    assert [one.index for one in places] == [*range(8), *range(8)]
    assert {one.readers("dec").num_readers for one in places} == {8}


def test_a_rank_alone_holds_everything():
    place = DecodePlace()
    assert place.layers(LAYOUT) == {"latent": tuple(range(10))}
    assert place.parts(LAYOUT) == {"latent": Part()}
    assert place.readers("dec").num_readers == 1


def test_dcp_carves_its_groups_out_of_tp():
    sizes = DecodeSizes(tp=4, dcp=2)
    assert [DecodePlace(sizes, rank).parts(LAYOUT)["latent"].token_index for rank in sizes.ranks()] == [0, 1, 0, 1]
    assert str(sizes) == "dp1pp1tp4dcp2"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DecodeSizes(tp=0), "tp=0 must be at least 1"),
        (lambda: DecodeSizes(tp=4, dcp=3), "dcp=3 does not divide tp=4"),
        (lambda: DecodeRank(pp=-1), "pp=-1"),
        (lambda: DecodePlace(DecodeSizes(tp=2), DecodeRank(tp=2)), "tp=2 is outside decode size tp=2"),
        (lambda: DecodePlace(owned={"latent": (10,)}).layers(LAYOUT), r"holds 'latent' layers \[10\]"),
        (lambda: DecodePlace(owned={"k": (1,)}).layers(LAYOUT), "no component 'k'"),
        (
            lambda: DecodePlace(DecodeSizes(tp=2, dcp=2)).parts(
                CacheLayout(1, (heads("k", 64, (0,), num_heads=1, head_bytes=4, dtype="x", total_heads=2),))
            ),
            "dcp=2 does not divide the 1 of tp=2",
        ),
    ],
)
def test_what_is_no_place_is_refused(make, words):
    with pytest.raises(LayoutError, match=words):
        make()
