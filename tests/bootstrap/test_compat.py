from dataclasses import replace

from pdlink.bootstrap.compat import check, check_body
from pdlink.bootstrap.messages import PROTOCOL, PrefillServerInfo, ProtocolRange, Side
from pdlink.layout import ParallelSizes, fingerprint
from pdlink.layout.components import heads
from tests.bootstrap.values import make_instance, make_layout


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
    assert "draft.k.page_bytes" in [one.field for one in found]
    assert check(Side.of(small), Side.of(large)) == ()


def test_this_build_speaks_version_one():
    assert PROTOCOL.agree(ProtocolRange(1, 1)) == 1
