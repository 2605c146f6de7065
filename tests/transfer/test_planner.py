import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlink.errors import LayoutError, PlanError
from pdlink.layout import LayerPlan, ParallelSizes, PlanKind, RankCoordinates
from pdlink.transfer.plan_check import check_batches
from pdlink.transfer.planner import PullPlanner, Source
from tests.transfer.values import Pair, ints, make_layout, make_regions

NUM_PAGES = 64


@st.composite
def pairs(draw):
    num_layers = draw(st.integers(1, 12))
    indexed = draw(st.none() | st.sets(st.integers(0, num_layers - 1)).map(sorted))
    sizes = ParallelSizes(pp=draw(st.integers(1, 3)), cp=draw(st.integers(1, 5)))
    kind = draw(st.sampled_from(PlanKind))
    return Pair.of(make_layout(num_layers, indexed, own_group=draw(st.booleans())), sizes, kind, NUM_PAGES)


@st.composite
def page_lists(draw, layout):
    """(source pages per worker, destination pages), both per group; some groups may ask for nothing."""
    pages = st.lists(st.integers(0, NUM_PAGES - 1), max_size=6, unique=True)
    wanted = {group.name: draw(pages) for group in layout.page_groups}
    sources = {
        name: draw(st.lists(st.integers(0, NUM_PAGES - 1), min_size=len(ids), max_size=len(ids), unique=True))
        for name, ids in wanted.items()
    }
    return sources, wanted


def contributors(planner):
    """Worker ids that serve at least one row; the others are subscribed and released all the same."""
    return tuple(one for one in planner.worker_ids if any(planner.rows(one, group).size for group in planner.groups))


def destinations(pair, wanted):
    """(group, component, layer, page) of every cell asked for."""
    return Counter(
        (group.name, name, layer, page)
        for group in pair.layout.page_groups
        for name in group.components
        for layer in pair.layout.component(name).layers
        for page in wanted[group.name]
    )


@settings(max_examples=60)
@given(st.data())
def test_any_plan_writes_each_cell_once_from_a_rank_that_owns_it(data):
    pair = data.draw(pairs())
    sources, wanted = data.draw(page_lists(pair.layout))
    planner, batches, written = pair.planner, [], Counter()
    held = {source.worker_id: {(one.component, one.layer): one for one in source.regions} for source in pair.sources}
    targets = {(one.component, one.layer): one for one in pair.destination}
    for worker_id in planner.worker_ids:
        for group, plan in planner.groups.items():
            cut = data.draw(st.integers(0, len(wanted[group])))
            for chunk in (slice(0, cut), slice(cut, None)):
                rows = planner.rows(worker_id, group)
                batch = planner.pull(worker_id, group, rows, ints(sources[group][chunk]), ints(wanted[group][chunk]))
                batches.append(batch)
                for move in batch.moves:
                    for at, row in enumerate(move.layers.rows):
                        cell = plan.cells[row]
                        assert move.layers.source_base[at] == held[worker_id][cell].base_address
                        assert move.layers.destination_base[at] == targets[cell].base_address
                        written.update((group, *cell, int(page)) for page in move.runs.destination_pages())
    assert written == destinations(pair, wanted)
    assert set(written.values()) <= {1}
    check_batches(planner, batches, {group: ints(pages) for group, pages in wanted.items()})


@settings(max_examples=40)
@given(pairs())
def test_ranks_that_own_nothing_contribute_nothing_and_all_others_of_a_split_do(pair):
    owners = [f"w{number}" for number, owned in enumerate(pair.plan.owned.values()) if any(owned.values())]
    found = contributors(pair.planner)
    assert set(found) <= set(owners)
    if set(pair.plan.kinds.values()) == {PlanKind.SPLIT}:
        assert list(found) == owners


PAIR = Pair.of(make_layout(10, (0, 4, 9)), ParallelSizes(cp=4), num_pages=NUM_PAGES)
SOURCE_PAGES = {"kv": [40, 41, 42, 7]}
PAGES = {"kv": [9, 10, 30, 2]}


# --- what a planner refuses ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "destination", "says"),
    [
        ([0, NUM_PAGES], [1, 2], "source page 64 is outside the 64 pages of 'latent' layer 0 at w0"),
        ([0, -1], [1, 2], "source page -1 is outside"),
        ([0, 1], [1, NUM_PAGES], "destination page 64 is outside the 64 pages of 'latent' layer 0 at this side"),
        ([0, 1], [-3, 2], "destination page -3 is outside"),
        ([0, 1], [1], "2 source pages do not pair with 1 destinations"),
    ],
)
def test_pages_that_a_region_lacks_are_refused(source, destination, says):
    with pytest.raises(PlanError, match=re.escape(says)):
        PAIR.planner.pull("w0", "kv", PAIR.planner.rows("w0", "kv"), ints(source), ints(destination))


def test_the_smallest_region_of_the_rows_sets_the_limit():
    sources = list(PAIR.sources)
    sources[0] = replace(sources[0], regions=(*sources[0].regions[:-1], replace(sources[0].regions[-1], num_pages=8)))
    planner = PullPlanner(PAIR.layout, sources, PAIR.destination)
    with pytest.raises(PlanError, match="source page 8 is outside the 8 pages of 'index_k' layer 0 at w0"):
        planner.pull("w0", "kv", planner.rows("w0", "kv"), ints([8]), ints([0]))


def test_layers_that_a_rank_does_not_own_are_refused():
    with pytest.raises(PlanError, match="w0 published 'latent' layer 5, which it does not own"):
        PAIR.planner.rows("w0", "kv", {"latent": (0, 5)})
    with pytest.raises(PlanError, match="w0 published 'nothing' layer 0, which it does not own"):
        PAIR.planner.rows("w0", "kv", {"nothing": (0,)})
    with pytest.raises(PlanError, match=re.escape("w0 does not serve all of the 1 rows")):
        PAIR.planner.pull("w0", "kv", PAIR.planner.rows("w1", "kv")[:1], ints([1]), ints([2]))


def test_a_rank_or_group_that_is_not_in_the_plan_is_refused():
    with pytest.raises(PlanError, match="w9 is not a rank"):
        PAIR.planner.rows("w9", "kv")
    with pytest.raises(PlanError, match="'state'"):
        PAIR.planner.pull("w0", "state", ints([0]), ints([0]), ints([0]))
    assert len(PAIR.planner.rows("w0", "state")) == 0


def test_page_bytes_that_differ_are_refused_with_both_values():
    destination = [replace(one, page_bytes=one.page_bytes - 8) for one in PAIR.destination]
    with pytest.raises(PlanError, match="'latent' layer 0 has page_bytes=41984 on prefill and 41976 on decode"):
        PullPlanner(PAIR.layout, PAIR.sources, destination)


def test_a_layer_without_an_owner_or_a_target_is_refused():
    with pytest.raises(PlanError, match="'latent' layer 3 has no owner on the prefill side"):
        PullPlanner(PAIR.layout, [one for one in PAIR.sources if one.worker_id != "w1"], PAIR.destination)
    lacking = [one for one in PAIR.destination if (one.component, one.layer) != ("index_k", 4)]
    with pytest.raises(PlanError, match="'index_k' layer 4 has no region on the decode side"):
        PullPlanner(PAIR.layout, PAIR.sources, lacking)


def test_two_ranks_of_one_name_are_refused():
    twice = [replace(one, worker_id="w0") for one in PAIR.sources]
    with pytest.raises(PlanError, match="share a name: w0, w0"):
        PullPlanner(PAIR.layout, twice, PAIR.destination)


# --- wanted layers, replicas, drafts, groups ------------------------------------------------------


def test_wanted_layers_narrow_the_rows_and_others_are_left_out():
    planner = PullPlanner(PAIR.layout, PAIR.sources, PAIR.destination, {"latent": [9, 3, 3]})
    assert planner.groups["kv"].cells == (("latent", 3), ("latent", 9))
    assert contributors(planner) == ("w1", "w3")
    assert planner.rows("w1", "kv", {"latent": (3, 4, 5), "index_k": (4,)}).tolist() == [0]
    assert planner.rows("w0", "kv").tolist() == []


def test_a_wanted_component_that_the_layout_lacks_is_refused():
    with pytest.raises(LayoutError, match="no component 'latnet'; the layout has latent, index_k"):
        PullPlanner(PAIR.layout, PAIR.sources, PAIR.destination, {"latent": [0], "latnet": [0]})
    with pytest.raises(PlanError, match="'index_k' layer 1 has no owner"):
        PullPlanner(PAIR.layout, PAIR.sources, PAIR.destination, {"index_k": [1]})


@pytest.mark.parametrize("num_layers", [10, 61, 78])
@pytest.mark.parametrize("cp", [2, 3, 4])
def test_replicas_share_the_load(num_layers, cp):
    pair = Pair.of(make_layout(num_layers), ParallelSizes(cp=cp), PlanKind.REPLICATED)
    plan = pair.planner.groups["kv"]
    loads = [int(plan.row_bytes[pair.planner.rows(one, "kv")].sum()) for one in pair.planner.worker_ids]
    assert sum(loads) == int(plan.row_bytes.sum())
    assert max(loads) - min(loads) <= 656 * 64, "no rank has more than one page a layer too many"


def test_a_row_that_another_replica_serves_is_left_out_of_a_publication():
    pair = Pair.of(make_layout(4), ParallelSizes(cp=2), PlanKind.REPLICATED)
    everything = {"latent": range(4), "index_k": range(4)}
    rows = [pair.planner.rows(worker_id, "kv", everything).tolist() for worker_id in ("w0", "w1")]
    assert rows == [[0, 2, 4, 6], [1, 3, 5, 7]]


def with_draft(layout):
    draft = replace(layout.components[0], name="draft.latent", layers=(0,))
    return replace(layout, components=(*layout.components, draft), num_draft_layers=1)


@pytest.mark.parametrize("side", ["both", "prefill", "decode"])
def test_a_draft_is_pulled_only_where_both_sides_have_one(side):
    layout = with_draft(make_layout(3))
    pair = Pair(layout, LayerPlan.balanced(layout, ParallelSizes(cp=2)))
    sources, destination = pair.sources, pair.destination
    if side == "decode":
        sources = [
            Source(one.worker_id, tuple(r for r in one.regions if not r.component.startswith("draft.")))
            for one in sources
        ]
    if side == "prefill":
        destination = [one for one in destination if not one.component.startswith("draft.")]
    planner = PullPlanner(layout, sources, destination)
    assert (("draft.latent", 0) in planner.groups["kv"].cells) is (side == "both")
    if side == "prefill":
        assert planner.rows("w1", "kv", {"latent": (2,), "draft.latent": (0,)}).tolist() == [2]
    if side != "both":
        with pytest.raises(PlanError, match=r"'draft\.latent' layer 0"):
            PullPlanner(layout, sources, destination, {"draft.latent": [0]})


def test_half_a_draft_is_never_pulled():
    """Pages of a draft of which some layers are of this request and some of another one are wrong bytes."""
    draft = replace(PAIR.layout.components[0], name="draft.latent", layers=(0, 1))
    layout = replace(PAIR.layout, components=(*PAIR.layout.components, draft), num_draft_layers=2)
    whole = make_regions(layout, {"draft.latent": (0, 1)}, 1 << 53, NUM_PAGES)
    for held, words in (((0, 1), ""), ((0,), "'draft.latent' layer 1 has no owner")):
        extra = make_regions(layout, {"draft.latent": held}, 1 << 51, NUM_PAGES)
        sources = [replace(PAIR.sources[0], regions=(*PAIR.sources[0].regions, *extra)), *PAIR.sources[1:]]
        if words:
            with pytest.raises(PlanError, match=words):
                PullPlanner(layout, sources, (*PAIR.destination, *whole))
        else:
            assert ("draft.latent", 1) in PullPlanner(layout, sources, (*PAIR.destination, *whole)).groups["kv"].cells


def test_two_page_groups_have_page_lists_of_their_own():
    layout = make_layout(4, own_group=True)
    pair = Pair.of(layout, ParallelSizes(cp=2), num_pages=16)
    assert {group.name: group.page_size for group in layout.page_groups} == {"kv": 64, "index": 32}
    source, wanted = {"kv": [1, 2], "index": [3, 9, 4, 5]}, {"kv": [7, 0], "index": [11, 12, 2, 6]}
    batches = pair.pull_all(source, wanted)
    check_batches(pair.planner, batches, {name: ints(pages) for name, pages in wanted.items()})
    for batch in batches:
        for move in batch.moves:
            found = dict(zip(move.runs.source_pages(), move.runs.destination_pages(), strict=True))
            assert found == dict(zip(source[move.group], wanted[move.group], strict=True))
            assert set(move.layers.page_bytes) == {64 * 656 if move.group == "kv" else 32 * 132}


def test_two_swapped_page_lists_are_refused_where_their_lengths_or_ids_show_it():
    pair = Pair.of(make_layout(4, own_group=True), ParallelSizes(cp=2), num_pages=16)
    planner = pair.planner
    swapped = {"kv": ints([3, 9, 4, 5]), "index": ints([1, 2])}
    wanted = {"kv": ints([7, 0]), "index": ints([11, 12, 2, 6])}
    for group in planner.groups:
        with pytest.raises(PlanError, match="do not pair"):
            planner.pull("w0", group, planner.rows("w0", group), swapped[group], wanted[group])


def test_a_rank_that_owns_nothing_is_a_source_of_no_regions():
    pair = Pair.of(make_layout(3), ParallelSizes(cp=4))
    assert pair.sources[3].regions == ()
    assert pair.plan.owned[RankCoordinates(cp=3)]["latent"] == ()
    assert contributors(pair.planner) == ("w0", "w1", "w2")
    batches = pair.pull_all(SOURCE_PAGES, PAGES)
    assert batches[3].moves == ()
    check_batches(pair.planner, batches, {"kv": ints(PAGES["kv"])})


def test_far_pages_are_planned_in_64_bits():
    num_pages = 1 << 20
    pair = Pair.of(make_layout(2), ParallelSizes(cp=2), num_pages=num_pages)
    page = num_pages - 1
    (batch,) = [one for one in pair.pull_all({"kv": [page]}, {"kv": [page]}) if one.worker_id == "w1"]
    (piece,) = batch.expand()
    nbytes = 64 * 656
    assert page * nbytes > 1 << 35
    assert int(piece.source[0]) == pair.sources[1].regions[0].base_address + page * nbytes
    assert np.all(piece.source > 1 << 44)
    check_batches(pair.planner, [*pair.pull_all({"kv": [page]}, {"kv": [page]})], {"kv": ints([page])})
