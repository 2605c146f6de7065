"""Owns one prefill rank of the tests, a process of its own: JSON lines in, JSON lines out, bytes in files.

A job names the world ranks that work together, stage by stage, each in the order of its cp group, how many pipeline
stages they are (default one), and whether layers are split or replicated.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pdlink.errors import PdlinkError
from pdlink.layout import CacheLayout, LayerPlan, OwnedLayers, ParallelSizes, PlanKind, RankCoordinates
from pdlink.layout.layer_plan import balanced_ranges
from pdlink.memory.broadcast_reader import BroadcastReader
from pdlink.memory.communicator import GroupCommunicator
from pdlink.memory.owners import ShardOwners
from pdlink.memory.sharded_pool import LayerShardedPool
from pdlink_engines.reference.gather import CpGroup
from pdlink_engines.reference.group import RankGroup
from pdlink_engines.reference.models import ReferenceModel, fix_threads, load_model
from pdlink_engines.reference.page_bytes import collect_pages
from pdlink_engines.reference.pipeline import Pipeline
from pdlink_engines.reference.prefill import FinishedPages, PrefillEngine, PrefillResult
from tests.engines.reference.ranks import GROUPS

TIMEOUT_S = 120.0


class Rank:
    """Models and groups, which outlive a job. Groups are made by all processes together before any job."""

    def __init__(self, me: int) -> None:
        self._me = me
        self._models: dict[str, ReferenceModel] = {}
        self._groups: dict[tuple[int, ...], tuple[dist.ProcessGroup, GroupCommunicator]] = {}
        for ranks in GROUPS:
            engine = dist.new_group(list(ranks), timeout=timedelta(seconds=TIMEOUT_S), sort_ranks=False)
            if me in ranks:
                self._groups[ranks] = engine, GroupCommunicator(ranks, timeout_s=TIMEOUT_S)

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        ranks, pp_size = tuple(job["ranks"]), job.get("pp", 1)
        cp_size = len(ranks) // pp_size
        pp = ranks.index(self._me) // cp_size
        stage, communicator = self._groups[ranks[pp * cp_size : (pp + 1) * cp_size]]
        pipeline = Pipeline(CpGroup(stage), RankGroup(self._groups[ranks][0]), pp, pp_size)
        if job["model"] not in self._models:
            self._models[job["model"]] = load_model(job["model"])
        model = self._models[job["model"]]
        layout = model.layout(job["page_size"])
        pool, owned = make_pool(layout, job, pipeline, communicator)
        try:
            return Job(job, pipeline, pool, owned, model).run()
        finally:
            pool.close()


def make_pool(
    layout: CacheLayout, job: dict[str, Any], pipeline: Pipeline, communicator: GroupCommunicator
) -> tuple[LayerShardedPool, OwnedLayers]:
    """The real pool; its scratch starts out full of 0xEE, which as a float is far off any key or value."""
    group = pipeline.cp
    plan = LayerPlan.balanced(layout, ParallelSizes(pp=pipeline.pp_size, cp=group.size), PlanKind(job["plan"]))
    me = RankCoordinates(pp=pipeline.pp, cp=group.rank)
    split = job["plan"] == "split" and group.size > 1
    reader = BroadcastReader(ShardOwners.of(layout, plan, me), communicator) if split else None
    pool = LayerShardedPool(layout, plan.owned[me], job["num_pages"], reader=reader)
    for component in layout.components:
        for buffer in pool.scratch_buffers(component.name):
            buffer.fill_(0xEE)
    return pool, plan.owned[me]


class Job:
    def __init__(
        self, job: dict[str, Any], pipeline: Pipeline, pool: LayerShardedPool, owned: OwnedLayers, model: ReferenceModel
    ) -> None:
        self._job = job
        self._rank = pipeline.everyone.rank
        self._pool = pool
        self._owned = owned
        self._told: list[dict[str, Any]] = []
        order = job.get("page_order")
        self._engine = PrefillEngine(
            model,
            pool,
            pipeline.cp,
            chunk_tokens=job["chunk"],
            on_pages=self._on_pages,
            # Stages need not hand out the same pages.
            page_order=order[::-1] if order and pipeline.pp else order,
            pipeline=pipeline,
            layers=balanced_ranges(model.shape.num_layers, pipeline.pp_size)[pipeline.pp],
        )

    def run(self) -> dict[str, Any]:
        results: list[dict[str, Any]] = []
        error = None
        try:
            for wave in self._job["waves"]:
                results += self._run_wave(wave)
        except PdlinkError as exc:
            error = {"type": type(exc).__name__, "text": str(exc)}
        return {"told": self._told, "results": results, "error": error, "nbytes_owned": self._pool.nbytes_owned}

    def _run_wave(self, wave: dict[str, Any]) -> list[dict[str, Any]]:
        for name, tokens in wave["submit"].items():
            self._engine.submit(name, tokens)
        for _ in range(wave.get("steps", 0)):
            assert self._engine.step() is None
        for name, ranks in wave.get("abort", {}).items():
            if self._rank in ranks:
                self._engine.release(name)
        done = self._engine.run(page_timeout_s=self._job.get("page_timeout_s", 20.0))
        results = [self._report(one) for one in done]
        for name, ranks in wave.get("release", {}).items():
            if self._rank in ranks:
                self._engine.release(name)
        return results

    def _on_pages(self, pages: FinishedPages) -> None:
        self._told.append(
            {
                "id": pages.request_id,
                "start": pages.start_page,
                "pages": pages.page_ids,
                "last": pages.last,
                "first_token": pages.first_token,
            }
        )

    def _report(self, result: PrefillResult) -> dict[str, Any]:
        """Put a result's logits and owned pages into files, before anything else can touch the pages."""
        folder, rank = Path(self._job["folder"]), self._rank
        result.logits.numpy().tofile(folder / f"{result.request_id}.{rank}.logits")
        cells = collect_pages(self._pool, result.page_ids, result.num_tokens, self._owned)
        for (component, layer), rows in cells.items():
            rows.numpy().tofile(folder / f"{result.request_id}.{rank}.{component}.{layer}.pages")
        return {
            "id": result.request_id,
            "pages": result.page_ids,
            "num_tokens": result.num_tokens,
            "cached": result.cached_tokens,
            "first_token": result.first_token,
            "cells": list(cells),
        }


def main() -> None:
    rank, world_size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    fix_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout)
    me = Rank(rank)
    for line in sys.stdin:
        print(json.dumps(me.run(json.loads(line))), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
