"""Owns one prefill rank of the tests, a process of its own: JSON lines in, JSON lines out, bytes in files.

A job names the world ranks that make up its cp group, in group order; ranks outside it only take part in making it.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pdlink.errors import PdlinkError
from pdlink.layout.layer_plan import balanced_ranges
from pdlink_engines.reference.gather import CpGroup
from pdlink_engines.reference.models import ReferenceModel, fix_threads, load_model
from pdlink_engines.reference.page_bytes import collect_pages
from pdlink_engines.reference.prefill import FinishedPages, PrefillEngine, PrefillResult
from tests.engines.reference.ranks import GROUPS
from tests.engines.reference.small_pool import SmallPool

TIMEOUT = timedelta(seconds=40)


class Rank:
    def __init__(self) -> None:
        self._models: dict[str, ReferenceModel] = {}
        # Made by all processes together, in one order, before any job: a group that is made later by some of them,
        # or anew over the same ranks, meets what earlier ones left in the store.
        self._groups = {ranks: dist.new_group(list(ranks), timeout=TIMEOUT, sort_ranks=False) for ranks in GROUPS}

    def _model(self, name: str) -> ReferenceModel:
        if name not in self._models:
            self._models[name] = load_model(name)
        return self._models[name]

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        group = CpGroup(self._groups[tuple(job["ranks"])])
        model = self._model(job["model"])
        layout = model.layout(job["page_size"])
        pool = SmallPool(layout, job["num_pages"])
        layers = balanced_ranges(layout.num_layers, group.size)[group.rank]
        owned = {one.name: tuple(x for x in one.layers if x in layers) for one in layout.components}
        told: list[dict[str, Any]] = []

        def on_pages(pages: FinishedPages) -> None:
            told.append(
                {
                    "id": pages.request_id,
                    "start": pages.start_page,
                    "pages": pages.page_ids,
                    "last": pages.last,
                    "first_token": pages.first_token,
                }
            )

        order = job.get("page_order")
        engine = PrefillEngine(model, pool, group, chunk_tokens=job["chunk"], on_pages=on_pages, page_order=order)
        results = []
        error = None
        try:
            for wave in job["waves"]:
                for name, tokens in wave["submit"].items():
                    engine.submit(name, tokens)
                for result in engine.run(page_timeout_s=job.get("page_timeout_s", 20.0)):
                    results.append(self._report(job, group, pool, owned, result))
                for name, ranks in wave.get("release", {}).items():
                    if group.rank in ranks:
                        engine.release(name)
        except PdlinkError as exc:
            error = {"type": type(exc).__name__, "text": str(exc)}
        return {"told": told, "results": results, "error": error}

    def _report(
        self,
        job: dict[str, Any],
        group: CpGroup,
        pool: SmallPool,
        owned: dict[str, tuple[int, ...]],
        result: PrefillResult,
    ) -> dict[str, Any]:
        """Put a result's logits and owned pages into files, before anything else can touch the pages."""
        folder = Path(job["folder"])
        stem = f"{result.request_id}.{group.rank}"
        result.logits.numpy().tofile(folder / f"{stem}.logits")
        for (component, layer), rows in collect_pages(pool, result.page_ids, result.num_tokens, owned).items():
            rows.numpy().tofile(folder / f"{result.request_id}.{component}.{layer}.pages")
        return {
            "id": result.request_id,
            "pages": result.page_ids,
            "num_tokens": result.num_tokens,
            "cached": result.cached_tokens,
            "first_token": result.first_token,
            "cells": [[name, layer] for name, layers in owned.items() for layer in layers],
        }


def main() -> None:
    rank, world_size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    fix_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=TIMEOUT)
    me = Rank()
    for line in sys.stdin:
        print(json.dumps(me.run(json.loads(line))), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
