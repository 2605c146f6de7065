"""Which bytes of one page become which bytes of another. Every slice is compared with a copy token by token, head by
head, over pages of any order of fields, strides and gaps.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.errors import LayoutError
from pdlink.layout import Component, Field, Part
from pdlink.layout.components import heads, index_k, latent
from pdlink.layout.page_slices import held_runs, obstacle, slice_page

PAGE_SIZE = 8
FIELDS = (("key", 3), ("scale", 1))


@st.composite
def pages(draw: st.DrawFn, num_heads: int, total_heads: int) -> Component:
    """A page of `num_heads` heads: fields in any order, with gaps, tokens or heads outermost."""
    fields, offset = [], draw(st.integers(0, 5))
    for name, nbytes in draw(st.permutations(FIELDS)):
        gap = draw(st.integers(0, 2))
        if draw(st.booleans()):
            token, head = num_heads * nbytes + gap, nbytes
        else:
            token, head = nbytes, PAGE_SIZE * nbytes + gap
        fields.append(Field(name, offset, nbytes, token, num_heads, head if num_heads > 1 else 0))
        offset = fields[-1].end(PAGE_SIZE) + draw(st.integers(0, 3))
    return Component("k", "x", PAGE_SIZE, offset + draw(st.integers(0, 3)), (0,), tuple(fields), "kv", total_heads)


def cells(component: Component, part: Part) -> dict[tuple[str, int, int], slice]:
    """(field, head of the model, token of the page) -> its bytes."""
    first = part.heads(component.model_heads).start
    return {
        (field.name, first + head, token): slice(start, start + field.bytes_per_token)
        for field in component.fields
        for token, row in enumerate(field.starts(PAGE_SIZE).tolist())
        for head, start in enumerate(row)
    }


@given(st.data(), st.integers(1, 8), st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1, 2, 4]))
def test_every_byte_that_is_wanted_comes_from_where_it_lies_and_no_other_is_touched(data, ours, theirs, dcp):
    total = 8
    held = Part(data.draw(st.integers(0, ours - 1)), ours)
    wanted = Part(data.draw(st.integers(0, theirs - 1)), theirs, data.draw(st.integers(0, dcp - 1)), dcp)
    source = data.draw(pages(len(held.heads(total)), total))
    destination = data.draw(pages(len(wanted.heads(total)), total))
    turn = data.draw(st.integers(0, dcp - 1))
    random = np.random.default_rng(1)
    here = random.integers(0, 255, source.page_bytes, dtype=np.uint8)
    expected = random.integers(0, 255, destination.page_bytes, dtype=np.uint8)
    found, packed = expected.copy(), []
    at, to = cells(source, held), cells(destination, wanted)
    for (name, head, token), where in at.items():
        local = turn * (PAGE_SIZE // dcp) + token // dcp
        if token % dcp == wanted.token_index and (name, head, local) in to:
            expected[to[name, head, local]] = here[where]
    made = slice_page(source, held, destination, wanted, turn)
    for begin, end, nbytes in zip(made.source, made.destination, made.nbytes, strict=True):
        found[end : end + nbytes] = here[begin : begin + nbytes]
        packed.append(here[begin : begin + nbytes])
    if made.is_whole:
        assert (source.fields, source.page_bytes, held) == (destination.fields, destination.page_bytes, wanted)
        expected = here
    assert np.array_equal(found, expected)
    offsets, sizes = held_runs(source, held, wanted)
    theirs_packed = [here[begin : begin + nbytes] for begin, nbytes in zip(offsets, sizes, strict=True)]
    if not made.is_whole:
        assert np.array_equal(np.concatenate([*theirs_packed, here[:0]]), np.concatenate([*packed, here[:0]]))
    assert bool(np.all(offsets[1:] > offsets[:-1] + sizes[:-1])), "runs that follow each other are one"


def test_like_pages_go_as_one_run_with_their_padding():
    made = slice_page(padded := Component("k", "x", 2, 10, (0,), (Field("k", 0, 4, 4),)), Part(), padded, Part())
    assert made.is_whole
    assert (made.num_runs, made.total_bytes) == (1, 10)


def test_heads_that_lie_together_go_as_one_run_a_token():
    whole = heads("k", 64, (0,), num_heads=8, head_bytes=32, dtype="x")
    half = heads("k", 64, (0,), num_heads=4, head_bytes=32, dtype="x", total_heads=8)
    made = slice_page(whole, Part(), half, Part(1, 2))
    assert (made.num_runs, set(made.nbytes.tolist())) == (64, {128})
    assert held_runs(half, Part(1, 2), Part())[1].tolist() == [64 * 128]


def test_parts_without_a_common_head_give_nothing():
    half = heads("k", 64, (0,), num_heads=4, head_bytes=32, dtype="x", total_heads=8)
    assert slice_page(half, Part(0, 2), half, Part(1, 2)).num_runs == 0


def test_tokens_of_one_residue_are_taken_field_by_field():
    keys = index_k(64, (0,))
    made = slice_page(keys, Part(), keys, Part(0, 1, 1, 2), turn=1)
    assert made.total_bytes == 32 * 132
    assert made.destination[0] == 32 * 128, "the second page's tokens follow those of the first"


MLA = latent(64, (0,), bytes_per_token=8)


@pytest.mark.parametrize(
    ("source", "held", "destination", "wanted", "words"),
    [
        (MLA, Part(), latent(32, (0,), bytes_per_token=8), Part(), "page_size=64 on prefill and 32 on decode"),
        (MLA, Part(), latent(64, (0,), bytes_per_token=9), Part(), "fields"),
        (MLA, Part(0, 1, 0, 2), MLA, Part(), "which only decode may do"),
        (MLA, Part(), MLA, Part(0, 1, 0, 3), "dcp=3 does not divide page_size=64"),
        (MLA, Part(0, 2), MLA, Part(), "1 of 1 heads in a page on prefill"),
        (MLA, Part(), MLA, Part(0, 2), "1 of 1 heads in a page on decode"),
    ],
)
def test_what_cannot_be_converted_is_refused_with_the_reason(source, held, destination, wanted, words):
    assert words in obstacle(source, held, destination, wanted)
    with pytest.raises(LayoutError, match=words):
        slice_page(source, held, destination, wanted)


@pytest.mark.parametrize(
    ("held", "wanted", "words"),
    [(Part(), Part(0, 9), "8 heads, not 9"), (Part(), Part(0, 1, 0, 7), "dcp=7"), (Part(0, 2), Part(), "8 of 8 heads")],
)
def test_what_nobody_can_take_of_a_page_is_refused(held, wanted, words):
    with pytest.raises(LayoutError, match=words):
        held_runs(heads("k", 64, (0,), num_heads=8, head_bytes=4, dtype="x"), held, wanted)
