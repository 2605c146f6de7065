import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.errors import LayoutError
from pdlink.layout import CacheLayout, Component, Field
from pdlink.layout.components import MAX_PAGE_BYTES, heads, index_k, latent

LATENT = latent(64, range(4), bytes_per_token=656)


def component(*fields, page_size=4, page_bytes=64, **more):
    return Component("c", "uint8", page_size, page_bytes, (0,), fields, **more)


def covered(one):
    """How often each byte of a page belongs to a field."""
    times = np.zeros(one.page_bytes, dtype=int)
    for field in one.fields:
        for start in field.starts(one.page_size).reshape(-1):
            times[start : start + field.bytes_per_token] += 1
    return times


@pytest.mark.parametrize(
    "one",
    [
        LATENT,
        index_k(64, range(4)),
        index_k(64, range(4), scale_bytes=0),
        heads("k", 16, range(4), num_heads=8, head_bytes=32, dtype="bfloat16"),
        heads("v", 16, range(4), num_heads=1, head_bytes=32, dtype="bfloat16"),
    ],
    ids=lambda one: one.name,
)
def test_the_named_components_cover_their_page_once(one):
    assert set(covered(one)) == {1}


def test_indexer_keys_come_before_all_scales_of_the_page():
    one = index_k(64, range(2))
    assert one.page_bytes == 64 * 132
    assert one.field("key").starts(64)[63, 0] + 128 == one.field("scale").offset
    assert list(one.field("scale").starts(64)[:3, 0]) == [8192, 8196, 8200]


def test_heads_lie_inside_their_token():
    field = heads("k", 4, (0,), num_heads=2, head_bytes=8, dtype="x").field("k")
    assert field.starts(4).tolist() == [[0, 8], [16, 24], [32, 40], [48, 56]]
    assert field.token_bytes == 16


def test_fields_that_overlap_are_refused():
    with pytest.raises(LayoutError, match="overlap"):
        component(Field("a", 0, 8, 8), Field("b", 31, 8, 8))


def test_a_field_whose_own_tokens_overlap_is_refused():
    with pytest.raises(LayoutError, match="overlap"):
        component(Field("a", 0, 8, 4))


def test_a_field_whose_heads_overlap_is_refused():
    with pytest.raises(LayoutError, match="overlap"):
        component(Field("a", 0, 4, 8, num_heads=2, head_stride=3))


def test_fields_may_interleave_token_by_token():
    one = component(Field("a", 0, 8, 16), Field("b", 8, 8, 16))
    assert set(covered(one)) == {1}


def test_bytes_that_no_field_covers_are_padding():
    assert covered(component(Field("a", 0, 4, 16))).sum() == 16


@pytest.mark.parametrize("field", [Field("a", 33, 8, 8), Field("a", 0, 8, 19), Field("a", 0, 1, 1, 2, 61)])
def test_a_field_that_ends_past_its_page_is_refused_with_the_byte(field):
    with pytest.raises(LayoutError, match=f"'a' of component 'c' ends at byte {field.end(4)}, past the page of 64"):
        component(field)


@pytest.mark.parametrize(
    "field",
    [
        Field("a", 0, 1, 0, num_heads=1 << 40),
        Field("a", 1 << 70, 1, 1),
        Field("a", 0, 1, 1 << 70),
        Field("a", 0, 1, 0),
    ],
)
@pytest.mark.parametrize("page_size", [4, 1 << 32])
def test_absurd_fields_are_refused_before_they_cost_memory(field, page_size):
    with pytest.raises(LayoutError):
        component(field, page_size=page_size)


@given(st.lists(st.tuples(st.integers(0, 70), st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=4))
def test_fields_are_taken_exactly_when_each_byte_is_covered_at_most_once(drawn):
    fields = tuple(Field(f"f{n}", *figures) for n, figures in enumerate(drawn))
    times = np.zeros(512, dtype=int)
    for field in fields:
        for start in field.starts(4).reshape(-1):
            times[start : start + field.bytes_per_token] += 1
    good = times.max() <= 1 and not times[64:].any()
    try:
        component(*fields)
    except LayoutError:
        assert not good
    else:
        assert good


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": ""}, "name"),
        ({"page_group": ""}, "page group"),
        ({"page_size": 0}, "page_size=0"),
        ({"page_bytes": 0}, "page_bytes=0"),
        ({"page_bytes": MAX_PAGE_BYTES + 1}, f"at most {MAX_PAGE_BYTES}"),
        ({"layers": (0, 0)}, "strictly increasing"),
        ({"layers": (1, 0)}, "strictly increasing"),
        ({"layers": (-1, 0)}, "strictly increasing"),
        ({"fields": ()}, "no fields"),
        ({"fields": (Field("a", 0, 1, 1), Field("a", 64, 1, 1))}, "names a field twice"),
    ],
)
def test_a_component_that_contradicts_itself_is_refused(change, says):
    with pytest.raises(LayoutError, match=says):
        replace(LATENT, **change)


@pytest.mark.parametrize("figures", [(-1, 1, 1), (0, 0, 1), (0, 1, -1), (0, 1, 1, 0), (0, 1, 1, 1, -1)])
def test_a_field_with_impossible_figures_is_refused(figures):
    with pytest.raises(LayoutError, match="'f'"):
        Field("f", *figures)


def test_an_unknown_name_is_refused_with_the_known_ones():
    layout = CacheLayout(4, (LATENT, index_k(64, (0, 2))))
    with pytest.raises(LayoutError, match="no component 'k'; the layout has latent, index_k"):
        layout.component("k")
    with pytest.raises(LayoutError, match="no field 'rope'; it has key, scale"):
        layout.component("index_k").field("rope")
    with pytest.raises(LayoutError, match="no page group 'state'; the layout has kv"):
        layout.page_group("state")


def test_cells_are_every_layer_that_a_component_has():
    layout = CacheLayout(4, (LATENT, index_k(64, (0, 2))))
    assert list(layout.cells()) == [("latent", n) for n in range(4)] + [("index_k", 0), ("index_k", 2)]


def test_draft_layers_are_counted_in_a_namespace_of_their_own():
    draft = replace(LATENT, name="draft.latent", layers=(0,))
    layout = CacheLayout(4, (LATENT, draft), num_draft_layers=1)
    assert draft.is_draft
    assert (layout.layers_of("latent"), layout.layers_of("draft.latent")) == (4, 1)
    with pytest.raises(LayoutError, match=re.escape("'draft.latent' has layer 0 of only 0 layers")):
        CacheLayout(4, (LATENT, draft))


def test_page_groups_are_the_components_that_share_page_ids():
    far = replace(index_k(32, (0, 2)), page_group="index")
    layout = CacheLayout(4, (LATENT, far))
    assert [(one.name, one.page_size, one.components) for one in layout.page_groups] == [
        ("kv", 64, ("latent",)),
        ("index", 32, ("index_k",)),
    ]
    assert [layout.page_group("index").num_pages(tokens) for tokens in (0, 1, 32, 33)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("num_layers", "components", "says"),
    [
        (4, (), "at least one component"),
        (4, (LATENT, LATENT), "names repeat"),
        (3, (LATENT,), "has layer 3 of only 3 layers"),
        (0, (replace(LATENT, layers=()),), "at least one layer"),
        (4, (replace(LATENT, layers=()),), "that has a layer"),
        (4, (LATENT, index_k(32, range(4))), "page_size=32 in page group 'kv' of page_size=64"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(num_layers, components, says):
    with pytest.raises(LayoutError, match=says):
        CacheLayout(num_layers, components)


def test_a_layout_of_draft_components_alone_is_refused():
    with pytest.raises(LayoutError, match="of the model"):
        CacheLayout(4, (replace(LATENT, name="draft.latent"),), num_draft_layers=4)
