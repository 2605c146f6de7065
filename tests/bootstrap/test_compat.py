from dataclasses import replace

from pdlink.bootstrap.compat import check, check_body, check_parts
from pdlink.bootstrap.messages import PROTOCOL, PrefillServerInfo, ProtocolRange, Side
from pdlink.config import Settings
from pdlink.layout import CacheLayout, ParallelSizes, Part, fingerprint
from pdlink.layout.components import heads
from tests.bootstrap.values import make_instance, make_layout, uneven_ranks


def make_info(registrations):
    one = registrations[0]
    ranks = tuple(each.rank for each in registrations)
    return PrefillServerInfo(
        one.instance, one.protocol, one.layout, fingerprint(one.layout), one.sizes, one.kinds, ranks
    )


def with_draft(layout, head_bytes):
    draft = replace(heads("k", 64, range(2), num_heads=2, head_bytes=head_bytes, dtype="bfloat16"), name="draft.k")
    return replace(layout, components=(*layout.components, draft), num_draft_layers=2)


def test_equal_sides_fit():
    assert check(Side.of(make_layout()), Side.of(make_layout())) == ()


def test_another_page_size_is_named_with_both_values():
    found = check(Side.of(make_layout(page_size=64)), Side.of(make_layout(page_size=32)))
    one = next(each for each in found if each.field == "latent.page_size")
    assert (one.prefill, one.decode) == ("64", "32")
    assert one.fix


def test_equal_page_tokens_of_other_bytes_are_named_with_both_values():
    found = check(Side.of(make_layout(latent_bytes=656)), Side.of(make_layout(latent_bytes=1312)))
    assert [(one.prefill, one.decode) for one in found if one.field == "latent.page_bytes"] == [("41984", "83968")]
    assert not [one for one in found if one.field.startswith("index_k")]


def test_a_common_protocol_version_is_enough_and_the_newest_is_taken():
    layout = make_layout()
    assert check(Side.of(layout, ProtocolRange(1, 3)), Side.of(layout, ProtocolRange(2, 5))) == ()
    assert ProtocolRange(1, 3).agree(ProtocolRange(2, 5)) == 3
    assert ProtocolRange(4, 5).agree(ProtocolRange(1, 3)) is None


def test_the_protocol_is_compared_before_anything_else():
    found = check(Side.of(make_layout(), ProtocolRange(1, 1)), Side.of(make_layout(5), ProtocolRange(2, 3)))
    assert [(one.field, one.prefill, one.decode) for one in found] == [("protocol", "1", "2..3")]
    assert found[0].fix == "upgrade pdlink on prefill"
    assert check(Side.of(make_layout(), ProtocolRange(3, 3)), Side.of(make_layout()))[0].fix.endswith("decode")


def test_a_whole_plan_has_a_good_body():
    assert check_body(make_info(make_instance(make_layout(10), ParallelSizes(cp=4))), make_layout(10)) == ()


def test_a_plan_with_a_gap_or_an_overlap_or_a_missing_rank_has_a_bad_body():
    layout, sizes = make_layout(10), ParallelSizes(cp=4)
    for owned, words in (({1: {"latent": (3, 4)}}, "no owner"), ({1: {"latent": (2, 3, 4, 5)}}, "owned by")):
        found = check_body(make_info(make_instance(layout, sizes, owned=owned)))
        assert found[0].field == "layer plan"
        assert words in found[0].prefill
    found = check_body(make_info(make_instance(layout, sizes)[:3]))
    assert [one.prefill for one in found] == ["rank dp0.pp0.cp3.tp0 has not registered"]


def test_drafts_are_compared_only_where_both_sides_have_one():
    plain, small, large = make_layout(), with_draft(make_layout(), 64), with_draft(make_layout(), 128)
    info = make_info(make_instance(small))
    assert check_body(info, plain) == ()
    assert check_body(info, small) == ()
    found = check_body(info, large)
    assert "draft.k.fields" in [one.field for one in found]
    assert check(Side.of(small), Side.of(large)) == ()


def test_this_build_speaks_version_one():
    assert PROTOCOL.agree(ProtocolRange(1, 1)) == 1


def by_heads(num_heads, **more):
    return CacheLayout(2, (heads("k", 64, range(2), num_heads=num_heads, head_bytes=8, dtype="bfloat16", **more),))


def of_heads(tp, num_heads):
    layout, sizes = by_heads(num_heads, total_heads=8), ParallelSizes(tp=tp)
    return make_info(make_instance(layout, sizes))


def test_sides_that_split_heads_otherwise_fit():
    sides = [Side.of(by_heads(8)), Side.of(by_heads(8, total_heads=8)), Side.of(by_heads(2, total_heads=8))]
    assert all(check(one, other) == () for one in sides for other in sides)


def test_sides_of_other_heads_do_not_fit():
    found = check(Side.of(by_heads(4, total_heads=8)), Side.of(by_heads(4, total_heads=16)))
    assert [(one.field, one.prefill, one.decode) for one in found] == [("k.heads", "8", "16")]
    assert "total_heads" in found[0].fix


def test_parts_of_one_model_can_be_converted():
    decode = by_heads(2, total_heads=8)
    for rank in range(4):
        assert check_parts(of_heads(2, 4), decode, {"k": Part(rank, 4)}, Settings()) == ()


def test_parts_are_converted_where_digests_are_verified_too():
    decode, verify = by_heads(2, total_heads=8), Settings(verify_digests=True)
    assert check_parts(of_heads(2, 4), decode, {"k": Part(1, 4)}, verify) == ()


def test_ranks_of_uneven_heads_are_converted_each_as_it_is():
    layouts = (by_heads(3, total_heads=5), by_heads(2, total_heads=5))
    ranks = uneven_ranks(layouts)
    info = replace(make_info(ranks[:1]), ranks=tuple(one.rank for one in ranks), tp_layouts=layouts)
    assert check_parts(info, by_heads(5), {"k": Part()}, Settings()) == ()
    assert [info.layout_of(tp).component("k").num_heads for tp in range(2)] == [3, 2]


def test_what_cannot_be_converted_is_a_mismatch():
    (found,) = check_parts(of_heads(1, 8), by_heads(8), {"k": Part(0, 1, 0, 3)}, Settings())
    assert found.field == "k.part"
    assert "dcp=3 does not divide page_size=64" in found.fix


def test_a_draft_that_prefill_lacks_is_refused_where_it_is_demanded():
    info, drafted = make_info(make_instance(make_layout())), with_draft(make_layout(), 64)
    parts = {one.name: Part() for one in drafted.components}
    assert check_parts(info, drafted, parts, Settings()) == ()
    (found,) = check_parts(info, drafted, parts, Settings(require_draft=True))
    assert (found.field, found.prefill, found.decode) == ("draft.k", "absent", "required")
    kept = [one.rank for one in make_instance(drafted)]
    kept = [replace(one, regions=tuple(r for r in one.regions if r.component != "draft.k")) for one in kept]
    hidden = replace(make_info(make_instance(drafted)), ranks=tuple(kept))
    assert check_parts(hidden, drafted, parts, Settings()) == ()
    (found,) = check_parts(hidden, drafted, parts, Settings(require_draft=True))
    assert (found.field, found.prefill, found.decode) == ("draft.k", "not offered", "required")
    assert check_parts(make_info(make_instance(drafted)), make_layout(), parts, Settings(require_draft=True)) == ()
