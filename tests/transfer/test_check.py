"""Whether `check_batches` finds every kind of damage to a plan, and names the cell."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlink.errors import PlanError
from pdlink.layout import ParallelSizes
from pdlink.transfer.descriptors import PageRuns
from pdlink.transfer.plan_check import check_batches
from tests.transfer.values import Pair, ints, make_layout

NUM_PAGES = 64
PAIR = Pair.of(make_layout(10, (0, 4, 9)), ParallelSizes(cp=4), num_pages=NUM_PAGES)
SOURCE_PAGES = {"kv": [40, 41, 42, 7]}
PAGES = {"kv": [9, 10, 30, 2]}
ASKED = {"kv": ints(PAGES["kv"])}


def whole():
    return PAIR.pull_all(SOURCE_PAGES, PAGES)


def refused(batches, says, asked=ASKED, pair=PAIR):
    with pytest.raises(PlanError, match=re.escape(says)):
        check_batches(pair.planner, batches, asked)


def with_move(batches, at, **changes):
    """The batches with the first move of one changed."""
    move = batches[at].moves[0]
    return [*batches[:at], replace(batches[at], moves=(replace(move, **changes),)), *batches[at + 1 :]]


def with_column(batches, at, name, row, by):
    layers = batches[at].moves[0].layers
    column = getattr(layers, name).copy()
    column[row] += by
    return with_move(batches, at, layers=replace(layers, **{name: column}))


def test_a_whole_plan_passes_the_check():
    check_batches(PAIR.planner, whole(), ASKED)


def test_a_hole_of_a_whole_owner_is_found_at_its_first_cell():
    refused([one for one in whole() if one.worker_id != "w1"], "'latent' layer 3, destination page 2 has no source")


def test_a_hole_of_one_page_is_found():
    planner = PAIR.planner
    rows = planner.rows("w3", "kv")
    batches = [one for one in whole() if one.worker_id != "w3"]
    batches.append(planner.pull("w3", "kv", rows, ints([40, 41, 7]), ints([9, 10, 2])))
    refused(batches, "'latent' layer 8, destination page 30 has no source")


def test_a_hole_of_one_layer_is_found():
    planner = PAIR.planner
    rows = planner.rows("w3", "kv")[1:]
    batches = [one for one in whole() if one.worker_id != "w3"]
    batches.append(planner.pull("w3", "kv", rows, ints(SOURCE_PAGES["kv"]), ASKED["kv"]))
    refused(batches, "'latent' layer 8, destination page 2 has no source")


def test_a_duplicate_batch_is_found_at_its_first_cell():
    refused([*whole(), whole()[2]], "'latent' layer 6, destination page 2 has more than one source")


@pytest.mark.parametrize("times", [2, 255, 256, 257, 513])
def test_no_number_of_duplicates_goes_unseen(times):
    refused([*whole()[:3], *[whole()[3]] * times], "'latent' layer 8, destination page 2 has more than one source")


@pytest.mark.parametrize("times", [1, 255, 256, 257])
def test_no_number_of_duplicates_of_some_pages_goes_unseen(times):
    planner = PAIR.planner
    again = planner.pull("w3", "kv", planner.rows("w3", "kv")[1:], ints([41, 42]), ints([10, 30]))
    refused([*whole(), *[again] * times], "'latent' layer 9, destination page 10 has more than one source")


@pytest.mark.parametrize("times", [2, 256, 257])
def test_a_page_that_one_move_writes_again_and_again_is_found(times):
    planner = PAIR.planner
    rows = planner.rows("w0", "kv")
    batches = [one for one in whole() if one.worker_id != "w0"]
    pages = PAGES["kv"] + [30] * (times - 1)
    batches.append(planner.pull("w0", "kv", rows, ints([1] * len(pages)), ints(pages)))
    refused(batches, "'latent' layer 0, destination page 30 has more than one source")


def test_a_row_that_one_move_lists_twice_is_found():
    layers = whole()[0].moves[0].layers
    doubled = layers.take(ints([0, 1, 1, 2, 3]))
    refused(with_move(whole(), 0, layers=doubled), "'latent' layer 1 is planned twice in one batch of w0")


def test_a_layer_asked_of_a_rank_that_does_not_serve_it_is_found():
    batches = whole()
    batches[1] = replace(batches[1], worker_id="w2")
    refused(batches, "'latent' layer 3 is asked of w2, but w1 serves it")


def test_a_batch_for_a_stranger_is_found():
    batches = whole()
    batches[1] = replace(batches[1], worker_id="w9")
    refused(batches, "w9 is not a rank of this prefill instance")


@pytest.mark.parametrize(
    "name", ["source_base", "source_stride", "destination_base", "destination_stride", "page_bytes"]
)
@pytest.mark.parametrize("by", [64, -64])
def test_an_address_that_is_not_the_regions_is_found(name, by):
    refused(with_column(whole(), 1, name, 2, by), f"'latent' layer 5 is planned with {name}=")


def test_two_layers_with_swapped_addresses_are_found():
    layers = whole()[1].moves[0].layers
    swapped = layers.source_base[ints([1, 0, 2, 3])]
    found = with_move(whole(), 1, layers=replace(layers, source_base=swapped))
    refused(found, "'latent' layer 3 is planned with source_base=")


def test_a_page_that_was_not_asked_for_is_found():
    refused(whole(), "page group 'kv': destination page 30 was not asked for", {"kv": ints([9, 10, 2])})
    refused(whole(), "was not asked for", {})


def test_a_page_that_is_asked_for_twice_is_found():
    refused(whole(), "'kv' asks for a destination page twice", {"kv": ints([9, 10, 30, 2, 9])})


def test_a_page_past_the_end_of_a_region_is_found():
    runs = whole()[1].moves[0].runs
    far = with_move(whole(), 1, runs=replace(runs, source=runs.source + NUM_PAGES))
    refused(far, "source page 106 is outside the 64 pages of 'latent' layer 3 at w1")
    last = with_move(whole(), 1, runs=PageRuns(ints([62]), ints([9]), ints([3])))
    refused(last, "source page 64 is outside the 64 pages of 'latent' layer 3 at w1")
    last = with_move(whole(), 1, runs=PageRuns(ints([9]), ints([62]), ints([3])))
    refused(last, "destination page 64 is outside the 64 pages of 'latent' layer 3 at this side")
    short = replace(PAIR, num_pages=30).planner
    with pytest.raises(PlanError, match="outside the 30 pages"):
        check_batches(short, whole(), ASKED)


def test_a_group_that_nobody_wants_is_found():
    refused(with_move(whole(), 0, group="state"), "page group 'state', of which nothing is wanted")


def test_rows_that_do_not_exist_are_found():
    layers = whole()[0].moves[0].layers
    for row in (-1, PAIR.planner.num_rows["kv"]):
        rows = layers.rows.copy()
        rows[0] = row
        refused(with_move(whole(), 0, layers=replace(layers, rows=rows)), "are outside the 13 of 'kv'")


def test_nothing_asked_for_and_nothing_planned_is_whole():
    check_batches(PAIR.planner, [], {})
    check_batches(PAIR.planner, PAIR.pull_all({"kv": []}, {"kv": []}), {"kv": ints([])})


@settings(max_examples=40)
@given(st.data())
def test_any_missing_or_repeated_batch_is_found(data):
    batches = [one for one in whole() if one.moves]
    which = data.draw(st.integers(0, len(batches) - 1))
    damaged = batches[:which] + batches[which + 1 :] if data.draw(st.booleans()) else [*batches, batches[which]]
    with pytest.raises(PlanError, match=r"destination page 2 has (no|more than one) source"):
        check_batches(PAIR.planner, damaged, ASKED)
