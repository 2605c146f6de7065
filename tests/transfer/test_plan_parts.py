"""Plans of pages that hold other heads or tokens than their sources: whole, checked, and damaged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.errors import PlanError
from pdlink.layout import CacheLayout, DecodePlace, DecodeRank, DecodeSizes, Region, part_of
from pdlink.layout.components import heads, index_k, latent
from pdlink.transfer.descriptors import PullBatch
from pdlink.transfer.plan_check import check_batches
from pdlink.transfer.planner import PullPlanner, Source
from tests.transfer.values import ints, make_regions

HEADS = 8
PAGES = 16


def gqa(tp: int) -> CacheLayout:
    made = (heads(n, 4, range(3), num_heads=HEADS // tp, head_bytes=2, dtype="x", total_heads=HEADS) for n in "kv")
    return CacheLayout(3, tuple(made))


MLA = CacheLayout(3, (latent(4, range(3), bytes_per_token=5), index_k(4, (0, 2))))


def regions(layout: CacheLayout, start: int) -> tuple[Region, ...]:
    return make_regions(layout, {one.name: one.layers for one in layout.components}, start, PAGES)


def make_planner(source: CacheLayout, tp: int, destination: CacheLayout, sizes: DecodeSizes, rank: int) -> PullPlanner:
    sources = [
        Source(f"w{n}", regions(source, (n + 1) << 44), {one.name: part_of(one, n, tp) for one in source.components})
        for n in range(tp)
    ]
    place = DecodePlace(sizes, DecodeRank(tp=rank))
    return PullPlanner(
        destination,
        sources,
        regions(destination, 1 << 52),
        source_layout=source,
        parts=place.parts(destination),
        turn=place.index,
    )


def pull_all(planner: PullPlanner, source: list[int], pages: list[int], first_page: int = 0) -> list[PullBatch]:
    return [
        planner.pull(one, "kv", planner.rows(one, "kv"), ints(source), ints(pages), first_page)
        for one in planner.worker_ids
    ]


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.data())
def test_a_plan_by_heads_writes_every_byte_of_every_page_once(tp, readers, data):
    rank = data.draw(st.integers(0, readers - 1))
    planner = make_planner(gqa(tp), tp, gqa(readers), DecodeSizes(tp=readers), rank)
    pages = data.draw(st.permutations(range(PAGES)))[:3]
    batches = pull_all(planner, [1, 2, 5], pages)
    check_batches(planner, batches, {"kv": ints(pages)})
    written = np.concatenate([rows.destination for batch in batches for rows in batch.expand()])
    sizes = np.concatenate([rows.nbytes for batch in batches for rows in batch.expand()])
    wanted = sum(one.page_bytes * 3 * 3 for one in gqa(readers).components)
    assert int(sizes.sum()) == wanted
    order = np.argsort(written)
    assert bool(np.all(written[order][1:] >= (written + sizes)[order][:-1])), "no byte is written twice"


@given(st.sampled_from([2, 4]), st.integers(0, 3), st.integers(0, 5))
def test_a_plan_by_tokens_fills_each_page_by_turns(dcp, rank, first_page):
    first_page *= dcp
    planner = make_planner(MLA, 1, MLA, DecodeSizes(tp=4, dcp=dcp), rank)
    positions = 7
    pages = [9 - at // dcp for at in range(positions)]
    batches = pull_all(planner, list(range(positions)), pages, first_page)
    check_batches(planner, batches, {"kv": ints(pages)}, {"kv": first_page})
    each = sum(one.page_bytes * len(one.layers) for one in MLA.components)
    assert sum(one.nbytes for one in batches) * dcp == each * positions
    assert set(planner.parts_from("w0")) == {"latent", "index_k"}
    with pytest.raises(PlanError, match="has no source"):
        check_batches(planner, [replace(batches[0], moves=batches[0].moves[1:])], {"kv": ints(pages)})
    with pytest.raises(PlanError):
        check_batches(planner, batches, {"kv": ints(pages)}, {"kv": first_page + 1})


def test_a_row_without_some_of_its_runs_is_refused():
    planner = make_planner(gqa(1), 1, gqa(2), DecodeSizes(tp=2), 0)
    (batch,) = pull_all(planner, [0], [1])
    (move,) = batch.moves
    short = replace(batch, moves=(replace(move, layers=move.layers.take(np.arange(1, move.layers.num_layers))),))
    with pytest.raises(PlanError, match="'k' layer 0 is planned in part"):
        check_batches(planner, [short], {"kv": ints([1])})


def test_runs_of_a_row_that_go_elsewhere_are_refused():
    planner = make_planner(gqa(1), 1, gqa(2), DecodeSizes(tp=2), 0)
    (batch,) = pull_all(planner, [0], [1])
    (move,) = batch.moves
    layers = replace(move.layers, destination_base=move.layers.destination_base[::-1].copy())
    with pytest.raises(PlanError, match="is planned with destination_base"):
        check_batches(planner, [replace(batch, moves=(replace(move, layers=layers),))], {"kv": ints([1])})


def test_whole_pages_are_planned_as_ever():
    planner = make_planner(gqa(2), 2, gqa(2), DecodeSizes(tp=2), 1)
    assert [len(planner.rows(one, "kv")) for one in planner.worker_ids] == [0, planner.num_rows["kv"]]
    assert planner.pulls_all_of("w1")
    assert not planner.pulls_all_of("w0")
    assert planner.parts_from("w1") == {}
    assert planner.groups["kv"].row_set(planner.rows("w1", "kv")).landing is None
    assert planner.groups["kv"].starts is None


def test_groups_whose_components_share_tokens_otherwise_are_refused():
    parts = DecodePlace(DecodeSizes(tp=2, dcp=2), DecodeRank()).parts(MLA)
    with pytest.raises(PlanError, match="spread over"):
        PullPlanner(MLA, [Source("w", regions(MLA, 1 << 44))], regions(MLA, 1 << 52), parts={"latent": parts["latent"]})
