"""Which heads and tokens the pages of a rank hold, and what does not come out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdlink.errors import LayoutError
from pdlink.layout import Component, Part, part_of
from pdlink.layout.components import heads, latent

MLA = latent(64, range(2), bytes_per_token=656)


def gqa(num_heads: int, total_heads: int, page_size: int = 64) -> Component:
    return heads("k", page_size, (0,), num_heads=num_heads, head_bytes=8, dtype="bfloat16", total_heads=total_heads)


def test_without_heads_every_tp_rank_holds_all():
    assert [part_of(MLA, tp, 4) for tp in range(4)] == [Part()] * 4


def test_heads_lie_on_the_ranks_in_order():
    assert [part_of(gqa(2, 8), tp, 4).heads(8) for tp in range(4)] == [range(tp * 2, tp * 2 + 2) for tp in range(4)]


@pytest.mark.parametrize(("total", "tp_size", "counts"), [(3, 2, [2, 1]), (8, 3, [3, 3, 2]), (6, 4, [2, 2, 1, 1])])
def test_where_tp_does_not_divide_the_heads_the_first_ranks_have_one_more(total, tp_size, counts):
    found = [part_of(gqa(count, total), tp, tp_size).heads(total) for tp, count in enumerate(counts)]
    assert [head for one in found for head in one] == list(range(total))
    assert [len(one) for one in found] == counts
    for tp, count in enumerate(counts):
        with pytest.raises(LayoutError, match=f"on tp rank {tp}"):
            part_of(gqa(count + 1 if count + 1 < total else count - 1, total), tp, tp_size)


def test_more_ranks_than_heads_makes_neighbours_hold_the_same():
    assert [part_of(gqa(1, 2), tp, 8).head_index for tp in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_ranks_that_hold_the_same_share_the_tokens():
    found = [part_of(gqa(1, 2), tp, 8, dcp=2) for tp in range(8)]
    assert [(one.head_index, one.token_index) for one in found] == [(h, t) for h in (0, 1) for t in (0, 1, 0, 1)]
    assert [part_of(MLA, tp, 4, dcp=4).token_index for tp in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("component", "tp_size", "dcp", "words"),
    [
        (gqa(2, 0), 2, 1, "does not say how many the model has"),
        (gqa(2, 8), 2, 1, "which makes 4 ranges; tp=2"),
        (gqa(2, 8), 10, 1, "which makes 4 ranges; tp=10"),
        (gqa(2, 4), 3, 2, "dcp=2 does not divide the 1 of tp=3"),
        (gqa(2, 8), 4, 2, "dcp=2 does not divide the 1 of tp=4"),
        (MLA, 4, 3, "dcp=3 does not divide the 4 of tp=4"),
        (replace(MLA, page_size=5, page_bytes=656 * 5), 2, 2, "dcp=2 does not divide page_size=5"),
        (MLA, 4, 0, "dcp=0"),
    ],
)
def test_what_does_not_come_out_is_refused(component, tp_size, dcp, words):
    with pytest.raises(LayoutError, match=words):
        part_of(component, 0, tp_size, dcp)


@pytest.mark.parametrize("part", [(1, 1), (-1, 2), (0, 0), (0, 1, 2, 2), (0, 1, -1, 2)])
def test_a_part_that_is_no_slice_is_refused(part):
    with pytest.raises(LayoutError, match="is no part"):
        Part(*part)


def test_a_rank_outside_tp_is_refused():
    with pytest.raises(LayoutError, match="tp rank 4 is outside tp=4"):
        part_of(MLA, 4, 4)


def test_a_page_has_no_more_heads_than_the_model():
    with pytest.raises(LayoutError, match="fields of \\[3\\] heads"):
        gqa(3, 2)
