import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.errors import LayoutError
from pdlink.layout import CacheLayout, LayerPlan, ParallelSizes, PlanKind, RankCoordinates, balanced_ranges, find_faults
from pdlink.layout.components import index_k, latent
from pdlink.layout.election import elect_aux_owner, may_send_aux

LAYERS = [1, 3, 10, 61, 78]


def make_layout(num_layers, indexed=None, num_draft_layers=0):
    components = (
        latent(64, range(num_layers), bytes_per_token=656),
        index_k(64, range(num_layers) if indexed is None else indexed),
    )
    if num_draft_layers:
        components += (replace(components[0], name="draft.latent", layers=tuple(range(num_draft_layers))),)
    return CacheLayout(num_layers, components, num_draft_layers)


def rank(**axes):
    return RankCoordinates(**axes)


def owned_by_cp(plan, component="latent"):
    return [plan.owned[rank(cp=cp)][component] for cp in range(plan.sizes.cp)]


def change(plan, where, **layers):
    return replace(plan, owned={**plan.owned, where: {**plan.owned[where], **layers}})


def texts(layout, plan):
    return [fault.text for fault in find_faults(layout, plan)]


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("cp", range(1, 9))
@pytest.mark.parametrize("num_layers", LAYERS)
def test_a_balanced_split_gives_each_layer_to_exactly_one_rank(num_layers, cp, pp):
    shared = range(0, num_layers, 4)
    layout = make_layout(num_layers, shared)
    plan = LayerPlan.balanced(layout, ParallelSizes(pp=pp, cp=cp))
    for component, layers in (("latent", range(num_layers)), ("index_k", shared)):
        given_out = [layer for place in plan.sizes.ranks() for layer in plan.owned[place][component]]
        assert given_out == list(layers), "each layer once, and ranks in order hold rising ranges"
    assert find_faults(layout, plan) == ()


@pytest.mark.parametrize("cp", range(1, 9))
@pytest.mark.parametrize("num_layers", LAYERS)
def test_shares_of_a_stage_differ_by_one_layer_at_most_and_the_first_ranks_have_more(num_layers, cp):
    plan = LayerPlan.balanced(make_layout(num_layers), ParallelSizes(cp=cp))
    counts = [len(layers) for layers in owned_by_cp(plan)]
    assert counts == sorted(counts, reverse=True)
    assert sum(counts) == num_layers
    assert counts[0] - counts[-1] <= 1


def test_ten_layers_over_four_ranks_are_three_three_two_two():
    plan = LayerPlan.balanced(make_layout(10), ParallelSizes(cp=4))
    assert owned_by_cp(plan) == [(0, 1, 2), (3, 4, 5), (6, 7), (8, 9)]


def test_seventy_eight_layers_over_eight_ranks_are_uneven_and_whole():
    plan = LayerPlan.balanced(make_layout(78), ParallelSizes(cp=8))
    assert [len(layers) for layers in owned_by_cp(plan)] == [10, 10, 10, 10, 10, 10, 9, 9]
    plan.check(make_layout(78))


def test_a_rank_may_own_nothing_and_the_plan_is_still_whole():
    layout = make_layout(3)
    plan = LayerPlan.balanced(layout, ParallelSizes(cp=4))
    assert plan.owned[rank(cp=3)] == {"latent": (), "index_k": ()}
    plan.check(layout)


def test_components_of_one_layer_have_one_owner():
    layout = make_layout(10, (1, 4, 9))
    plan = LayerPlan.balanced(layout, ParallelSizes(cp=4))
    for layer in (1, 4, 9):
        assert plan.owners("index_k", layer) == plan.owners("latent", layer)
    assert plan.owners("index_k", 0) == ()


def test_every_dp_and_tp_coordinate_has_a_whole_split_of_its_own():
    layout = make_layout(5)
    plan = LayerPlan.balanced(layout, ParallelSizes(dp=2, cp=2, tp=2))
    for dp in range(2):
        for tp in range(2):
            assert plan.owners("latent", 4, dp, tp) == (rank(dp=dp, cp=1, tp=tp),)
    plan.check(layout)


def test_a_replicated_plan_gives_every_rank_its_whole_stage():
    layout = make_layout(5, (0, 4))
    plan = LayerPlan.balanced(layout, ParallelSizes(pp=2, cp=3), PlanKind.REPLICATED)
    assert {plan.owned[rank(pp=0, cp=cp)]["latent"] for cp in range(3)} == {(0, 1, 2)}
    assert {plan.owned[rank(pp=1, cp=cp)]["latent"] for cp in range(3)} == {(3, 4)}
    assert plan.owners("index_k", 4) == tuple(rank(pp=1, cp=cp) for cp in range(3))
    plan.check(layout)


def test_a_replica_that_lacks_a_layer_is_a_fault():
    layout = make_layout(4)
    plan = LayerPlan.balanced(layout, ParallelSizes(cp=2), PlanKind.REPLICATED)
    assert texts(layout, change(plan, rank(cp=1), latent=(0, 1, 3))) == [
        "'latent' layer 2 is replicated on only ['dp0.pp0.cp0.tp0']"
    ]


def test_a_layer_replicated_across_stages_is_a_fault():
    layout = make_layout(4)
    plan = LayerPlan.balanced(layout, ParallelSizes(pp=2), PlanKind.REPLICATED)
    assert "'latent' layer 0 is replicated on only" in texts(layout, change(plan, rank(pp=1), latent=(0, 2, 3)))[0]


def test_draft_components_are_whole_on_the_last_rank_of_the_last_stage():
    layout = make_layout(4, num_draft_layers=2)
    plan = LayerPlan.balanced(layout, ParallelSizes(pp=2, cp=2))
    assert {place: layers["draft.latent"] for place, layers in plan.owned.items() if layers["draft.latent"]} == {
        rank(pp=1, cp=1): (0, 1)
    }
    plan.check(layout)
    replicated = LayerPlan.balanced(layout, ParallelSizes(pp=2, cp=2), PlanKind.REPLICATED)
    assert replicated.owners("draft.latent", 1) == (rank(pp=1, cp=0), rank(pp=1, cp=1))
    replicated.check(layout)


def test_a_gap_is_found_with_its_layers_and_place():
    layout = make_layout(10)
    plan = LayerPlan.balanced(layout, ParallelSizes(cp=4))
    holed = change(change(plan, rank(cp=1), latent=()), rank(cp=3), latent=(9,))
    assert texts(layout, holed) == ["'latent' layers 3-5, 8 have no owner at dp0.tp0"]
    with pytest.raises(LayoutError, match=re.escape("'latent' layers 3-5, 8 have no owner at dp0.tp0")):
        holed.check(layout)


def test_an_overlap_is_found_with_its_layer_and_both_owners():
    layout = make_layout(10)
    plan = LayerPlan.balanced(layout, ParallelSizes(cp=4))
    assert texts(layout, change(plan, rank(cp=1), latent=(2, 3, 4, 5))) == [
        "'latent' layer 2 is owned by dp0.pp0.cp0.tp0 and dp0.pp0.cp1.tp0; a split layer has one owner"
    ]


def test_an_overlap_between_stages_is_found():
    layout = make_layout(10)
    plan = LayerPlan.balanced(layout, ParallelSizes(pp=2))
    (found,) = texts(layout, change(plan, rank(pp=1), index_k=tuple(range(4, 10))))
    assert "'index_k' layer 4 is owned by dp0.pp0.cp0.tp0 and dp0.pp1.cp0.tp0" in found


def test_a_missing_rank_is_found_by_its_name():
    layout = make_layout(10)
    plan = LayerPlan.balanced(layout, ParallelSizes(cp=4))
    owned = {place: layers for place, layers in plan.owned.items() if place.cp != 2}
    found = texts(layout, replace(plan, owned=owned))
    assert found[0] == "rank dp0.pp0.cp2.tp0 has not registered"
    assert "'latent' layers 6-7 have no owner at dp0.tp0" in found


def test_a_missing_rank_that_would_own_nothing_is_a_fault_too():
    layout = make_layout(3)
    plan = LayerPlan.balanced(layout, ParallelSizes(cp=4))
    owned = {place: layers for place, layers in plan.owned.items() if place.cp != 3}
    assert texts(layout, replace(plan, owned=owned)) == ["rank dp0.pp0.cp3.tp0 has not registered"]


def test_a_fault_at_one_dp_or_tp_coordinate_names_it():
    layout = make_layout(4)
    plan = LayerPlan.balanced(layout, ParallelSizes(dp=2, tp=2))
    assert texts(layout, change(plan, rank(dp=1, tp=1), latent=(0, 1, 2))) == [
        "'latent' layers 3 have no owner at dp1.tp1"
    ]


def test_layers_that_the_layout_lacks_are_a_fault():
    layout = make_layout(4, (0, 2))
    plan = LayerPlan.balanced(layout, ParallelSizes(cp=2))
    assert "owns 'index_k' layers [1] that the layout lacks" in texts(layout, change(plan, rank(), index_k=(0, 1)))[0]
    assert "owns 'k' layers [0] that the layout lacks" in texts(layout, change(plan, rank(), k=(0,)))[0]


def test_a_component_without_a_plan_is_a_fault():
    layout = make_layout(4)
    plan = LayerPlan.balanced(layout, ParallelSizes(cp=2))
    assert texts(layout, replace(plan, kinds={"latent": PlanKind.SPLIT})) == ["component 'index_k' states no plan"]


def test_components_may_be_split_and_replicated_in_one_plan():
    layout = make_layout(4)
    split = LayerPlan.balanced(layout, ParallelSizes(cp=2))
    whole = LayerPlan.balanced(layout, ParallelSizes(cp=2), PlanKind.REPLICATED)
    owned = {place: {**split.owned[place], "index_k": whole.owned[place]["index_k"]} for place in split.owned}
    mixed = LayerPlan(split.sizes, {"latent": PlanKind.SPLIT, "index_k": PlanKind.REPLICATED}, owned)
    assert find_faults(layout, mixed) == ()
    assert len(find_faults(layout, replace(mixed, kinds=split.kinds))) == 4


@given(st.data())
def test_any_single_damage_to_a_split_is_found(data):
    num_layers, cp = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    layout = make_layout(num_layers)
    plan = LayerPlan.balanced(layout, ParallelSizes(cp=cp))
    where = rank(cp=data.draw(st.integers(0, cp - 1)))
    layer = data.draw(st.integers(0, num_layers - 1))
    had = layer in plan.owned[where]["latent"]
    mine = set(plan.owned[where]["latent"]) ^ {layer}
    (found,) = texts(layout, change(plan, where, latent=tuple(sorted(mine))))
    assert (f"layers {layer} have no owner" if had else f"layer {layer} is owned by") in found


def test_stages_may_start_where_the_engine_says():
    layout = make_layout(10)
    plan = LayerPlan.balanced(layout, ParallelSizes(pp=3), stage_starts=[0, 1, 8])
    assert [plan.owned[rank(pp=pp)]["latent"] for pp in range(3)] == [(0,), tuple(range(1, 8)), (8, 9)]
    plan.check(layout)


@pytest.mark.parametrize("starts", [[0], [1, 5], [0, 11], [5, 0], [0, 5, 7]])
def test_stage_starts_that_do_not_cut_the_layers_are_refused(starts):
    with pytest.raises(LayoutError, match=re.escape(f"stage starts {starts}")):
        LayerPlan.balanced(make_layout(10), ParallelSizes(pp=2), stage_starts=starts)


def test_a_plan_for_a_rank_outside_the_sizes_is_refused():
    with pytest.raises(LayoutError, match="cp=2 is outside parallel size cp=2"):
        LayerPlan(ParallelSizes(cp=2), {}, {rank(cp=2): {}})


@pytest.mark.parametrize("split", [(-1, 1), (3, 0)])
def test_an_impossible_split_is_refused(split):
    with pytest.raises(LayoutError, match="cannot split"):
        balanced_ranges(*split)


@pytest.mark.parametrize("kind", PlanKind)
@pytest.mark.parametrize("pp", [1, 3])
@pytest.mark.parametrize("num_layers", [1, 3, 10])
def test_one_rank_of_each_dp_group_is_elected_whatever_the_order_of_components(num_layers, pp, kind):
    layout = make_layout(num_layers, range(0, num_layers, 4))
    other = replace(layout, components=layout.components[::-1])
    plan = LayerPlan.balanced(layout, ParallelSizes(dp=2, pp=pp, cp=4, tp=2), kind)
    for dp in range(2):
        elected = elect_aux_owner(layout, plan, dp)
        assert elect_aux_owner(other, plan, dp) == elected
        assert (elected.dp, elected.tp) == (dp, 0)
        assert num_layers - 1 in plan.owned[elected]["latent"]
        able = [place for place in plan.owned if place.dp == dp and may_send_aux(layout, plan.owned[place], place)]
        assert elected in able
        assert kind is PlanKind.REPLICATED or able == [elected]


def test_the_election_among_components_of_one_last_layer_goes_by_their_names():
    layout = make_layout(4)
    split = LayerPlan.balanced(layout, ParallelSizes(cp=2))
    owned = {place: {**layers, "index_k": (0, 1, 2, 3)} for place, layers in split.owned.items()}
    mixed = LayerPlan(split.sizes, {"latent": PlanKind.SPLIT, "index_k": PlanKind.REPLICATED}, owned)
    for order in (layout.components, layout.components[::-1]):
        assert elect_aux_owner(replace(layout, components=order), mixed, 0) == rank(cp=1)


def test_a_rank_that_owns_nothing_is_never_elected():
    layout = make_layout(3)
    plan = LayerPlan.balanced(layout, ParallelSizes(cp=4))
    assert elect_aux_owner(layout, plan, 0) == rank(cp=2)
    assert not may_send_aux(layout, {}, rank(cp=3))


def test_a_component_without_layers_takes_no_part_in_the_election():
    layout = make_layout(3, ())
    turned = replace(layout, components=layout.components[::-1])
    plan = LayerPlan.balanced(turned, ParallelSizes(cp=2))
    assert elect_aux_owner(turned, plan, 0) == rank(cp=1)
