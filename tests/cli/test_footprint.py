"""KV memory of a plan: ranks together hold each layer once, and scratch follows what others own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.errors import LayoutError
from pdlink.layout import CacheLayout, LayerPlan, ParallelSizes, PlanKind
from pdlink.layout.components import heads, index_k, latent
from pdlink.layout.footprint import measure


def layout_of(num_layers: int, index_layers: tuple[int, ...]) -> CacheLayout:
    return CacheLayout(num_layers, (latent(4, range(num_layers), bytes_per_token=6), index_k(4, index_layers)))


@given(
    st.integers(1, 12),
    st.sets(st.integers(0, 11)),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(0, 2),
)
def test_a_split_plan_holds_every_byte_once(
    num_layers: int, index: set[int], cp: int, pp: int, num_tokens: int, reserved: int
) -> None:
    layout = layout_of(num_layers, tuple(sorted(layer for layer in index if layer < num_layers)))
    pages = -(-num_tokens // 4) + reserved
    whole = sum(len(one.layers) * one.page_bytes for one in layout.components) * pages
    found = measure(
        [layout], LayerPlan.balanced(layout, ParallelSizes(cp=cp, pp=pp)), num_tokens, reserved_pages=reserved
    )
    assert sum(rank.owned_bytes for rank in found.ranks) == whole
    for stage in range(pp):
        ranks = [rank for rank in found.ranks if rank.rank.pp == stage]
        assert {rank.unsplit_bytes for rank in ranks} == {sum(rank.owned_bytes for rank in ranks)}


@given(st.integers(1, 12), st.integers(1, 5))
def test_scratch_is_kept_for_components_of_which_others_own_layers(num_layers: int, cp: int) -> None:
    layout = layout_of(num_layers, (0,))
    plan = LayerPlan.balanced(layout, ParallelSizes(cp=cp))
    found = measure([layout], plan, 4, reserved_pages=0, scratch_slots=3)
    for rank in found.ranks:
        expected = sum(
            3 * one.page_bytes for one in layout.components if set(one.layers) - set(rank.owned.get(one.name, ()))
        )
        assert rank.scratch_bytes == expected


def test_page_groups_are_counted_in_their_own_pages() -> None:
    k = heads("k", 4, range(2), num_heads=1, head_bytes=1, dtype="bfloat16")
    state = latent(16, range(2), bytes_per_token=1)
    grouped = type(state)("state", "float32", 16, 16, (0, 1), state.fields, "state")
    layout = CacheLayout(2, (k, grouped))
    found = measure([layout], LayerPlan.balanced(layout, ParallelSizes(), PlanKind.REPLICATED), 17, reserved_pages=1)
    assert found.num_pages == {"kv": 6, "state": 3}
    assert found.owned_bytes == 2 * (6 * 4 + 3 * 16)


@pytest.mark.parametrize("values", [(0, 1, 2), (1, -1, 2), (1, 1, -1)])
def test_figures_that_mean_nothing_are_refused(values: tuple[int, int, int]) -> None:
    layout = layout_of(2, ())
    tokens, reserved, slots = values
    with pytest.raises(LayoutError, match="num_tokens"):
        measure(
            [layout],
            LayerPlan.balanced(layout, ParallelSizes()),
            tokens,
            reserved_pages=reserved,
            scratch_slots=slots,
        )
