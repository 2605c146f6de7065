"""Live pages: which pages and rows a batch's prefixes make, and how slots are found in them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.errors import LayoutError
from pdlink.layout import CacheLayout, Component
from pdlink.layout.components import index_k, latent
from pdlink.memory.forward import LivePages, ReadSpan, live_pages
from pdlink.memory.forward_state import ForwardState, check_order

NUM_PAGES = 9


def layout_of(page_size: int) -> CacheLayout:
    return CacheLayout(2, (latent(page_size, range(2), bytes_per_token=8),))


def two_groups() -> CacheLayout:
    one = index_k(16, range(2))
    index = Component(one.name, one.dtype, 16, one.page_bytes, one.layers, one.fields, page_group="index")
    return CacheLayout(2, (latent(64, range(2), bytes_per_token=8), index))


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, list[ReadSpan]]:
    page_size = draw(st.integers(1, 5))
    spans = []
    for _ in range(draw(st.integers(0, 4))):
        pages = draw(st.lists(st.integers(0, NUM_PAGES - 1), unique=True, max_size=NUM_PAGES))
        spans.append(ReadSpan(pages, draw(st.integers(0, len(pages) * page_size))))
    return page_size, spans


def slots_in(live: LivePages) -> set[int]:
    return {
        int(page) * live.page_size + row
        for page, rows in zip(live.page_ids, live.rows, strict=True)
        for row in np.flatnonzero(rows)
    }


def slots_named(page_size: int, spans: list[ReadSpan]) -> set[int]:
    return {
        span.pages[token // page_size] * page_size + token % page_size
        for span in spans
        for token in range(span.num_tokens)
    }


@given(batches())
def test_live_rows_are_the_tokens_of_all_spans(batch: tuple[int, list[ReadSpan]]) -> None:
    page_size, spans = batch
    live = live_pages(layout_of(page_size), spans, NUM_PAGES)["kv"]
    assert slots_in(live) == slots_named(page_size, spans)
    assert live.page_ids.dtype == np.int64
    assert len(set(live.page_ids.tolist())) == live.num_pages
    assert live.rows.any(axis=1).all(), "a page without a row is not live"


@given(batches())
def test_full_pages_come_first_and_the_rest_is_listed_by_row(batch: tuple[int, list[ReadSpan]]) -> None:
    live = live_pages(layout_of(batch[0]), batch[1], NUM_PAGES)["kv"]
    assert live.rows[: live.num_full].all()
    assert not live.rows[live.num_full :].all(axis=1).any()
    position, row = live.partial_rows()
    assert (position >= live.num_full).all()
    partial = set((live.page_ids[position] * live.page_size + row).tolist())
    full = {
        int(page) * live.page_size + row for page in live.page_ids[: live.num_full] for row in range(live.page_size)
    }
    assert partial | full == slots_in(live)
    assert not partial & full


@given(batches(), st.lists(st.integers(0, NUM_PAGES - 1)))
def test_a_slot_is_contained_exactly_when_its_row_is_live(batch: tuple[int, list[ReadSpan]], pages: list[int]) -> None:
    live = live_pages(layout_of(batch[0]), batch[1], NUM_PAGES)["kv"]
    slots = np.array([page * batch[0] + row for page in pages for row in range(batch[0])], np.int64)
    assert live.contains(slots).tolist() == [slot in slots_in(live) for slot in slots.tolist()]


@given(batches(), st.data())
def test_adding_slots_adds_those_rows_and_no_others(batch: tuple[int, list[ReadSpan]], data: st.DataObject) -> None:
    page_size, spans = batch
    live = live_pages(layout_of(page_size), spans, NUM_PAGES)["kv"]
    slots = data.draw(st.lists(st.integers(0, NUM_PAGES * page_size - 1)))
    added = live.adding(np.array(slots, np.int64))
    assert slots_in(added) == slots_in(live) | set(slots)
    assert (added.digest == live.digest) == (slots_in(added) == slots_in(live))


def test_the_digest_tells_rows_of_the_same_pages_apart() -> None:
    layout = layout_of(64)
    digests = [
        live_pages(layout, spans, NUM_PAGES)["kv"].digest
        for spans in ([ReadSpan([1, 2], 100)], [ReadSpan([1, 2], 101)], [ReadSpan([2, 1], 100)], [ReadSpan([1], 64)])
    ]
    assert len(set(digests)) == 4
    assert all(0 <= one < 1 << 63 for one in digests)


def test_a_span_may_list_the_pages_of_the_chunk_too() -> None:
    live = live_pages(layout_of(4), [ReadSpan([5, 2, 7], 6)], NUM_PAGES)["kv"]
    assert live.page_ids.tolist() == [5, 2]


def test_page_groups_are_told_apart() -> None:
    live = live_pages(two_groups(), [ReadSpan([3, 1], 70), ReadSpan([4, 5, 6, 0, 8], 70, "index")], NUM_PAGES)
    assert slots_in(live["kv"]) == slots_named(64, [ReadSpan([3, 1], 70)])
    assert slots_in(live["index"]) == slots_named(16, [ReadSpan([4, 5, 6, 0, 8], 70)])


def test_the_only_group_needs_no_name_and_several_need_one() -> None:
    one = latent(4, range(1), bytes_per_token=8)
    other = Component("state", one.dtype, 4, one.page_bytes, (0,), one.fields, page_group="state")
    alone = CacheLayout(1, (other,))
    assert live_pages(alone, [ReadSpan([1], 2)], NUM_PAGES)["state"].num_pages == 1
    third = Component("more", one.dtype, 4, one.page_bytes, (0,), one.fields, page_group="more")
    with pytest.raises(LayoutError, match="must name its page group, one of state, more"):
        live_pages(CacheLayout(1, (other, third)), [ReadSpan([1], 2)], NUM_PAGES)


@pytest.mark.parametrize(
    ("span", "words"),
    [
        (ReadSpan([1], 5), "needs 2 pages"),
        (ReadSpan([NUM_PAGES], 1), f"page {NUM_PAGES} is outside"),
        (ReadSpan([-1], 1), "page -1 is outside"),
        (ReadSpan([3, 3], 6), "lists a page twice"),
        (ReadSpan([1], 1, "other"), "no page group 'other'"),
    ],
)
def test_a_span_that_cannot_be_is_refused(span: ReadSpan, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        live_pages(layout_of(4), [span], NUM_PAGES)


def test_a_negative_token_count_is_refused() -> None:
    with pytest.raises(LayoutError, match="num_tokens=-1"):
        ReadSpan([1], -1)


def test_the_record_of_a_begin_tells_forwards_apart() -> None:
    layout = two_groups()

    def begin(number: int, spans: list[ReadSpan], order: list[tuple[str, int]], setup: int) -> object:
        return ForwardState(number, live_pages(layout, spans, NUM_PAGES), check_order(layout, order)).begin_step(setup)

    spans, order = [ReadSpan([3, 1], 70), ReadSpan([4], 5, "index")], [("latent", 0), ("index_k", 1)]
    assert begin(1, spans, order, 5) == begin(1, spans[::-1], order, 5)
    others = [
        begin(2, spans, order, 5),
        begin(1, spans[:1], order, 5),
        begin(1, [ReadSpan([3, 1], 71), spans[1]], order, 5),
        begin(1, [ReadSpan([3, 1], 70), ReadSpan([5], 5, "index")], order, 5),
        begin(1, spans, order[::-1], 5),
        begin(1, spans, [], 5),
        begin(1, spans, order, 6),
    ]
    assert len({begin(1, spans, order, 5), *others}) == len(others) + 1


def test_a_layer_order_names_layers_of_the_layout() -> None:
    with pytest.raises(LayoutError, match="'latent' layer 2"):
        check_order(two_groups(), [("latent", 2)])
