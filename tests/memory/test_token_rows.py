"""Token rows in pages: reads, writes and moves by field, compared with bytes found one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdlink.errors import LayoutError
from pdlink.layout import Component, Field
from pdlink.layout.components import heads, index_k, latent
from pdlink.memory.token_rows import (
    check_rows,
    check_slots,
    copy_rows,
    move_rows,
    put_fields,
    put_pages,
    read_rows,
    split_slots,
)

NUM_PAGES = 5

COMPONENTS = [
    latent(64, range(1), bytes_per_token=656),
    index_k(64, range(1)),
    index_k(3, range(1), key_bytes=7, scale_bytes=2),
    heads("k", 5, range(1), num_heads=3, head_bytes=10, dtype="bfloat16"),
    # Heads outermost, and padding between and behind the fields.
    Component("v", "bfloat16", 4, 101, (0,), (Field("v", 3, 6, 6, 2, 30), Field("tail", 70, 1, 7))),
    Component("state", "float32", 1, 48, (0,), (Field("state", 0, 48, 0),)),
]
components = pytest.mark.parametrize("component", COMPONENTS, ids=lambda one: f"{one.name}{one.page_size}")


def places(component: Component, field: Field, slot: int) -> list[int]:
    """The byte offsets of a token's field in the flat pool, one by one."""
    page, row = divmod(slot, component.page_size)
    start = page * component.page_bytes + field.offset + row * field.token_stride
    return [
        start + head * field.head_stride + i for head in range(field.num_heads) for i in range(field.bytes_per_token)
    ]


def random_pages(component: Component, seed: int) -> torch.Tensor:
    random = np.random.default_rng(seed)
    return torch.from_numpy(random.integers(0, 256, (NUM_PAGES, component.page_bytes), dtype=np.uint8))


def some_slots(component: Component, **limits: int) -> st.SearchStrategy[list[int]]:
    limits.setdefault("max_size", 24)
    return st.lists(st.integers(0, NUM_PAGES * component.page_size - 1), unique=True, **limits)  # type: ignore[arg-type]


@components
@given(data=st.data())
def test_rows_are_the_bytes_of_their_tokens(component: Component, data: st.DataObject) -> None:
    pages, slots = random_pages(component, 1), data.draw(some_slots(component))
    flat = pages.reshape(-1)
    for field in component.fields:
        came = read_rows(
            pages, component, field, *split_slots(torch.tensor(slots, dtype=torch.int64), component.page_size)
        )
        assert came.shape == (len(slots), field.token_bytes)
        assert came.dtype == torch.uint8
        assert came.tolist() == [flat[places(component, field, slot)].tolist() for slot in slots]


@components
@given(data=st.data())
def test_a_write_changes_those_bytes_and_no_others(component: Component, data: st.DataObject) -> None:
    pages, slots = random_pages(component, 1), data.draw(some_slots(component))
    expected, new = pages.clone().reshape(-1), random_pages(component, 2).reshape(-1)
    fields = {}
    for field in data.draw(st.permutations(component.fields)):
        fields[field.name] = new[: len(slots) * field.token_bytes].reshape(len(slots), field.token_bytes)
        for slot, row in zip(slots, fields[field.name], strict=True):
            expected[places(component, field, slot)] = row
    put_fields(pages, component, torch.tensor(slots, dtype=torch.int64), fields)
    assert torch.equal(pages.reshape(-1), expected)


@components
@given(data=st.data())
def test_a_move_takes_tokens_along_even_when_the_sets_overlap(component: Component, data: st.DataObject) -> None:
    pages, targets = random_pages(component, 1), data.draw(some_slots(component))
    sources = data.draw(
        st.lists(st.integers(0, NUM_PAGES * component.page_size - 1), min_size=len(targets), max_size=len(targets))
    )
    before, expected = pages.clone().reshape(-1), pages.clone().reshape(-1)
    for source, target in zip(sources, targets, strict=True):
        for field in component.fields:
            expected[places(component, field, target)] = before[places(component, field, source)]
    move_rows(pages, component, torch.tensor(sources, dtype=torch.int64), torch.tensor(targets, dtype=torch.int64))
    assert torch.equal(pages.reshape(-1), expected)


def test_index_keys_move_with_their_tokens_from_page_to_page() -> None:
    component = index_k(64, range(1))
    pages = random_pages(component, 1)
    before = pages.clone()
    move_rows(pages, component, torch.tensor([3]), torch.tensor([130]))
    assert torch.equal(pages[2, 2 * 128 : 3 * 128], before[0, 3 * 128 : 4 * 128])
    assert torch.equal(pages[2, 8192 + 2 * 4 : 8192 + 3 * 4], before[0, 8192 + 3 * 4 : 8192 + 4 * 4])
    assert int((pages != before).sum()) <= 132
    assert torch.equal(pages[[0, 1, 3, 4]], before[[0, 1, 3, 4]])


@components
@given(data=st.data())
def test_copied_rows_keep_their_place_in_the_page(component: Component, data: st.DataObject) -> None:
    source, target = random_pages(component, 1), random_pages(component, 2)
    slots = data.draw(some_slots(component, max_size=20))
    shift = data.draw(st.permutations(range(NUM_PAGES)))
    expected = target.clone().reshape(-1)
    for slot in slots:
        page, row = divmod(slot, component.page_size)
        for field in component.fields:
            here = places(component, field, shift[page] * component.page_size + row)
            expected[here] = source.reshape(-1)[places(component, field, slot)]
    page, row = split_slots(torch.tensor(slots, dtype=torch.int64), component.page_size)
    copy_rows(component, source, page, target, torch.tensor(shift)[page], row)
    assert torch.equal(target.reshape(-1), expected)


@components
def test_whole_pages_bring_their_padding(component: Component) -> None:
    source, target = random_pages(component, 1), random_pages(component, 2)
    expected = target.clone()
    expected[[4, 1]] = source[[0, 3]]
    put_pages(target, torch.tensor([4, 1]), source[[0, 3]])
    assert torch.equal(target, expected)
    put_pages(target, torch.tensor([], dtype=torch.int64), source[:0])
    assert torch.equal(target, expected)


def test_rows_at_any_address_can_be_written() -> None:
    component = latent(4, range(1), bytes_per_token=16)
    pages, odd = random_pages(component, 1), random_pages(component, 2).reshape(-1)[3:35].reshape(2, 16)
    put_fields(pages, component, torch.tensor([5, 0]), {"latent": odd})
    assert torch.equal(pages.reshape(-1, 16)[[5, 0]], odd)
    turned = odd.t().contiguous().t()
    put_fields(pages, component, torch.tensor([1, 2]), {"latent": turned})
    assert torch.equal(pages.reshape(-1, 16)[[1, 2]], odd)


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        (torch.tensor([20]), "outside the 20 slots"),
        (torch.tensor([-1]), "span -1..-1"),
        (torch.tensor([1], dtype=torch.int32), "int64"),
        (torch.tensor([[1]]), "int64"),
    ],
)
def test_slots_outside_the_pool_are_refused(slots: torch.Tensor, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        check_slots(slots, latent(4, range(1), bytes_per_token=16), NUM_PAGES)


@pytest.mark.parametrize(
    "data", [torch.zeros((2, 16)), torch.zeros((2, 15), dtype=torch.uint8), torch.zeros((3, 16), dtype=torch.uint8)]
)
def test_rows_of_another_shape_are_refused(data: torch.Tensor) -> None:
    component = latent(4, range(1), bytes_per_token=16)
    with pytest.raises(LayoutError, match=r"takes uint8 \[2, 16\]"):
        check_rows(component, component.fields[0], data, 2)
