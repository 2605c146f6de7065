import itertools
from dataclasses import replace

import pytest

from pdlink.layout import CacheLayout, Field, compare, fingerprint
from pdlink.layout.components import heads, index_k, latent

LATENT = latent(64, range(4), bytes_per_token=656)
INDEX = index_k(64, (0, 2))
STATE = replace(latent(1, range(4), bytes_per_token=64), name="state", page_group="state")
LAYOUT = CacheLayout(4, (LATENT, INDEX, STATE))


def changed(name, **fields):
    """LAYOUT with one component changed."""
    components = tuple(replace(one, **fields) if one.name == name else one for one in LAYOUT.components)
    return replace(LAYOUT, components=components)


def test_equal_layouts_have_one_digest_whatever_the_order_of_components():
    digests = {
        fingerprint(replace(LAYOUT, components=order)).digest for order in itertools.permutations(LAYOUT.components)
    }
    assert len(digests) == 1
    assert len(digests.pop()) == 16


def test_the_order_in_which_fields_are_listed_makes_no_difference():
    assert fingerprint(changed("index_k", fields=INDEX.fields[::-1])) == fingerprint(LAYOUT)


DIFFERENCES = [
    ("num_layers", replace(LAYOUT, num_layers=5), "4", "5"),
    ("latent.dtype", changed("latent", dtype="float8_e4m3fn"), "bfloat16", "float8_e4m3fn"),
    ("latent.layers", changed("latent", layers=(0, 1, 3)), "0,1,2,3", "0,1,3"),
    ("index_k.layers", changed("index_k", layers=(1, 3)), "0,2", "1,3"),
    ("latent.page_bytes", changed("latent", page_bytes=64 * 656 + 64), "41984", "42048"),
    ("latent.page_group", changed("latent", page_group="mla"), "kv", "mla"),
    (
        "index_k.fields",
        changed("index_k", fields=(Field("key", 0, 128, 132), Field("scale", 128, 4, 132))),
        "key@0:128B/128x1/0; scale@8192:4B/4x1/0",
        "key@0:128B/132x1/0; scale@128:4B/132x1/0",
    ),
    (
        "index_k.fields",
        changed("index_k", fields=(Field("key", 0, 64, 128, 2, 64), INDEX.field("scale"))),
        "key@0:128B/128x1/0; scale@8192:4B/4x1/0",
        "key@0:64B/128x2/64; scale@8192:4B/4x1/0",
    ),
    (
        "index_k.fields",
        changed("index_k", fields=(INDEX.field("key"), Field("factor", 8192, 4, 4))),
        "key@0:128B/128x1/0; scale@8192:4B/4x1/0",
        "key@0:128B/128x1/0; factor@8192:4B/4x1/0",
    ),
]


@pytest.mark.parametrize(("name", "other", "ours", "theirs"), DIFFERENCES)
def test_a_changed_fact_is_the_one_mismatch_with_both_values_and_a_fix(name, other, ours, theirs):
    (found,) = compare(fingerprint(LAYOUT), fingerprint(other))
    assert (found.field, found.prefill, found.decode) == (name, ours, theirs)
    assert found.fix
    assert fingerprint(LAYOUT).digest != fingerprint(other).digest
    (back,) = compare(fingerprint(other), fingerprint(LAYOUT))
    assert (back.prefill, back.decode) == (theirs, ours)


def test_another_page_size_is_the_first_mismatch_of_its_component():
    prefill = CacheLayout(4, (LATENT, INDEX))
    decode = CacheLayout(4, (latent(32, range(4), bytes_per_token=656), index_k(32, (0, 2))))
    found = compare(fingerprint(prefill), fingerprint(decode))
    named = {one.field: (one.prefill, one.decode) for one in found}
    assert found[0].field == "index_k.page_size"
    assert named["latent.page_size"] == named["index_k.page_size"] == ("64", "32")
    assert "page size" in found[0].fix


def test_equal_page_tokens_of_other_bytes_are_a_mismatch_in_bytes():
    decode = replace(LAYOUT, components=(latent(64, range(4), bytes_per_token=1312), INDEX, STATE))
    found = compare(fingerprint(LAYOUT), fingerprint(decode))
    assert [(one.field, one.prefill, one.decode) for one in found] == [
        ("latent.page_bytes", "41984", "83968"),
        ("latent.fields", "latent@0:656B/656x1/0", "latent@0:1312B/1312x1/0"),
    ]
    assert "dtype" in found[0].fix


def test_a_component_that_one_side_lacks_is_named_as_absent():
    found = compare(fingerprint(LAYOUT), fingerprint(replace(LAYOUT, components=(LATENT, STATE))))
    assert {one.field.partition(".")[0] for one in found} == {"index_k"}
    assert {one.decode for one in found} == {"absent"}
    other_way = compare(fingerprint(replace(LAYOUT, components=(LATENT, STATE))), fingerprint(LAYOUT))
    assert {one.prefill for one in other_way} == {"absent"}


def test_a_draft_model_is_no_part_of_the_fingerprint():
    draft = replace(heads("k", 64, range(2), num_heads=1, head_bytes=8, dtype="bfloat16"), name="draft.k")
    drafted = replace(LAYOUT, components=(*LAYOUT.components, draft), num_draft_layers=2)
    assert fingerprint(drafted) == fingerprint(LAYOUT)


def test_equal_sides_have_no_mismatch():
    assert compare(fingerprint(LAYOUT), fingerprint(replace(LAYOUT))) == ()
