"""A million tokens in 78 layers over 8 ranks: planning and coverage hold no row for each page of each layer."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from pdlink.layout import CacheLayout, DecodePlace, DecodeRank, DecodeSizes, LayerPlan, ParallelSizes, Part, part_of
from pdlink.layout.components import heads, index_k, latent
from pdlink.transfer.coverage import Coverage
from pdlink.transfer.plan_check import check_batches
from pdlink.transfer.planner import PullPlanner, Source
from tests.transfer.values import make_regions

NUM_LAYERS, CP, PAGES = 78, 8, (1 << 20) // 64
POOL = PAGES + 64
MOST_BYTES = 96 << 20
"""Coverage takes two bytes a cell, 5 MB; rows of every page and layer would be 61 MB a column."""
CHUNK = 1024


def mla() -> CacheLayout:
    layers = range(NUM_LAYERS)
    return CacheLayout(NUM_LAYERS, (latent(64, layers, bytes_per_token=1152), index_k(64, layers)))


def gqa(num_heads: int) -> CacheLayout:
    made = (
        heads(n, 64, range(NUM_LAYERS), num_heads=num_heads, head_bytes=256, dtype="x", total_heads=8) for n in "kv"
    )
    return CacheLayout(NUM_LAYERS, tuple(made))


def planner_of(source: CacheLayout, sizes: ParallelSizes, destination: CacheLayout, taken: DecodeSizes) -> PullPlanner:
    plan = LayerPlan.balanced(source, sizes)
    sources = []
    for number, rank in enumerate(sizes.ranks()):
        parts: dict[str, Part] = {one.name: part_of(one, rank.tp, sizes.tp) for one in source.components}
        regions = make_regions(source, plan.owned[rank], (number + 1) << 44, POOL)
        sources.append(Source(f"w{number}", regions, parts))
    place = DecodePlace(taken, DecodeRank(tp=taken.tp - 1))
    every = {one.name: one.layers for one in destination.components}
    target = make_regions(destination, every, 1 << 52, POOL)
    return PullPlanner(
        destination, sources, target, source_layout=source, parts=place.parts(destination), turn=place.index
    )


@pytest.mark.parametrize(
    ("source", "sizes", "destination", "taken"),
    [
        (mla(), ParallelSizes(cp=CP), mla(), DecodeSizes()),
        (mla(), ParallelSizes(cp=CP), mla(), DecodeSizes(tp=8, dcp=8)),
        (gqa(4), ParallelSizes(cp=4, tp=2), gqa(1), DecodeSizes(tp=8)),
    ],
    ids=["whole", "by tokens", "by heads"],
)
def test_planning_and_coverage_of_a_million_tokens_take_little_memory(source, sizes, destination, taken):
    planner = planner_of(source, sizes, destination, taken)
    rng = np.random.default_rng(1)
    pages = rng.permutation(POOL)[:PAGES].astype(np.int64)
    own = np.repeat(pages[: -(-PAGES // taken.dcp)], taken.dcp)[:PAGES]
    tracemalloc.start()
    try:
        coverage = Coverage(planner.num_rows, {"kv": PAGES})
        batches = []
        for worker_id in planner.worker_ids:
            rows = planner.rows(worker_id, "kv")
            theirs = rng.permutation(POOL)[:PAGES].astype(np.int64)
            batches.append(planner.pull(worker_id, "kv", rows, theirs, own))
            for start in range(0, PAGES, CHUNK):
                coverage.claim("kv", rows, start, start + CHUNK)
                coverage.land("kv", rows, start, start + CHUNK)
            next(iter(batches[-1].expand()), None)
        check_batches(planner, batches, {"kv": own})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert coverage.is_complete
    assert peak < MOST_BYTES, f"{peak >> 20} MiB"
    each = sum(one.page_bytes * len(one.layers) for one in destination.components)
    assert sum(batch.nbytes for batch in batches) == PAGES * each // taken.dcp
