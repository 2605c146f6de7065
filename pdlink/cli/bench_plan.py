"""Owns `pdlink bench plan`: how long one request's pull plan takes, check included, at the size of GLM-5.2.

Timed is what a request costs: from the page ids of both sides to the batches that a backend receives. The first round
also builds the planner, which a pair of instances does once.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import numpy as np

    from pdlink.bootstrap.messages import PrefillServerInfo
    from pdlink.layout.components import CacheLayout
    from pdlink.layout.layer_plan import LayerPlan, OwnedLayers
    from pdlink.layout.regions import Region
    from pdlink.transfer.descriptors import Int64Array, PullBatch
    from pdlink.transfer.planner import PullPlanner, Source

ROUNDS = 7
PAGE_SIZE = 64
GROUP = "kv"
SPREAD = 2
"""Pages of a pool for each page of the request: the request's are drawn from all over it."""


class Form(StrEnum):
    """What a backend receives: page pairs once and layers as offsets, or a row for each run and layer."""

    FACTORED = "factored"
    EXPANDED = "expanded"


class Fault(StrEnum):
    """Damage to the plan that its check must find."""

    NONE = "none"
    HOLE = "hole"
    DUPLICATE = "duplicate"


@dataclass(frozen=True, slots=True)
class Pages:
    """One request's page ids, int64 [num_pages]: those of each owner, and decode's."""

    source: tuple[Int64Array, ...]
    destination: Int64Array


@dataclass(frozen=True)
class Scene:
    """Both sides of a link as a planner sees them. Nothing is allocated: the addresses are figures."""

    layout: CacheLayout
    plan: LayerPlan
    sources: tuple[Source, ...]
    destination: tuple[Region, ...]
    num_pages: int


def bench_plan(
    pages: Annotated[int, typer.Option(min=1, max=1 << 22, help="Pages of the request.")] = 16_384,
    layers: Annotated[int, typer.Option(min=1, max=4096, help="Layers, each with latent and indexer pages.")] = 78,
    owners: Annotated[int, typer.Option(min=1, max=1024, help="Prefill ranks among which layers are split.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Of the random page ids.")] = 0,
    form: Annotated[Form, typer.Option(help="What the backend receives.")] = Form.FACTORED,
    inject: Annotated[Fault, typer.Option(help="Damage each plan: its check must fail (exit 1).")] = Fault.NONE,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Time the planning of one request, from page ids to checked batches."""
    import numpy as np

    from pdlink.cli.output import console, print_json, print_table
    from pdlink.cli.progress import progress

    scene = make_scene(pages, layers, owners)
    generator = np.random.default_rng(seed)
    rounds_ms: list[float] = []
    with progress("plans", ROUNDS + 1) as bar:
        draws = [draw_pages(scene, generator) for _ in range(ROUNDS + 1)]
        started = time.perf_counter()
        planner = build_planner(scene)
        batches = plan_request(planner, draws[0], form, inject)
        cold_ms = (time.perf_counter() - started) * 1e3
        for draw in draws[1:]:
            bar.step()
            started = time.perf_counter()
            batches = plan_request(planner, draw, form, inject)
            rounds_ms.append((time.perf_counter() - started) * 1e3)
    result = {
        "plan_ms": statistics.median(rounds_ms),
        "cold_ms": cold_ms,
        "form": form.value,
        "num_pages": pages,
        "num_layers": layers,
        "num_owners": owners,
        "num_cells": pages * sum(planner.num_rows.values()),
        "num_descriptors": sum(batch.num_descriptors for batch in batches),
        "num_bytes": sum(batch.nbytes for batch in batches),
        "handshake_bytes": handshake_bytes(scene),
        "rounds_ms": rounds_ms,
    }
    if json:
        print_json(result)
        return
    rows = [
        ("plan and check, median of 7", f"{result['plan_ms']:.2f} ms"),
        ("first time, planner included", f"{cold_ms:.2f} ms"),
        ("form", form.value),
        ("pages x layers x owners", f"{pages:,} x {layers} x {owners}"),
        ("cells checked", f"{result['num_cells']:,}"),
        ("descriptors that it stands for", f"{result['num_descriptors']:,}"),
        ("handshake, once for a pair", f"{result['handshake_bytes']:,} B"),
    ]
    print_table(console(), ("planning", ""), rows)


def make_scene(num_pages: int, num_layers: int, num_owners: int) -> Scene:
    """A layout like GLM-5.2's, split over `num_owners` ranks."""
    from pdlink.layout.components import CacheLayout, index_k, latent
    from pdlink.layout.layer_plan import LayerPlan
    from pdlink.layout.parallel import ParallelSizes
    from pdlink.transfer.planner import Source

    ids = range(num_layers)
    layout = CacheLayout(num_layers, (latent(PAGE_SIZE, ids, bytes_per_token=1152), index_k(PAGE_SIZE, ids)))
    sizes = ParallelSizes(cp=num_owners)
    plan = LayerPlan.balanced(layout, sizes)
    pool_pages = SPREAD * num_pages
    sources = tuple(
        Source(f"prefill/{rank}", _regions(layout, plan.owned[rank], pool_pages, 1 << 40)) for rank in sizes.ranks()
    )
    everything = {one.name: one.layers for one in layout.components}
    return Scene(layout, plan, sources, _regions(layout, everything, pool_pages, 1 << 41), num_pages)


def _regions(layout: CacheLayout, owned: OwnedLayers, num_pages: int, base: int) -> tuple[Region, ...]:
    from pdlink.layout.regions import Region

    regions = []
    for name, ids in owned.items():
        nbytes = layout.component(name).page_bytes
        for layer in ids:
            regions.append(Region(name, layer, base, nbytes, nbytes, num_pages))
            base += num_pages * nbytes
    return tuple(regions)


def draw_pages(scene: Scene, generator: np.random.Generator) -> Pages:
    """Page ids scattered over the pools, in no order, different on every owner."""
    import numpy as np

    def draw() -> Int64Array:
        return generator.permutation(np.arange(SPREAD * scene.num_pages, dtype=np.int64))[: scene.num_pages]

    return Pages(tuple(draw() for _ in scene.sources), draw())


def build_planner(scene: Scene) -> PullPlanner:
    from pdlink.transfer.planner import PullPlanner

    return PullPlanner(scene.layout, scene.sources, scene.destination)


def plan_request(planner: PullPlanner, pages: Pages, form: Form, fault: Fault = Fault.NONE) -> list[PullBatch]:
    """The batches of one request, checked. Raises `PlanError` naming the cell that has no source, or two."""
    from pdlink.transfer.plan_check import check_batches

    batches = []
    for worker_id, source in zip(planner.worker_ids, pages.source, strict=True):
        rows = planner.rows(worker_id, GROUP)
        batches.append(planner.pull(worker_id, GROUP, rows, source, pages.destination))
    if fault is not Fault.NONE:
        batches = _damaged(planner, pages, batches, fault)
    check_batches(planner, batches, {GROUP: pages.destination})
    if form is Form.EXPANDED:
        for batch in batches:
            for _ in batch.expand():
                pass
    return batches


def _damaged(planner: PullPlanner, pages: Pages, batches: list[PullBatch], fault: Fault) -> list[PullBatch]:
    """A plan without the last page of the last rank that owns anything, or with that page's last layer twice."""
    number = max(index for index, batch in enumerate(batches) if batch.moves)
    worker_id, source, target = planner.worker_ids[number], pages.source[number], pages.destination
    rows = planner.rows(worker_id, GROUP)
    if fault is Fault.HOLE:
        return [
            *batches[:number],
            planner.pull(worker_id, GROUP, rows, source[:-1], target[:-1]),
            *batches[number + 1 :],
        ]
    return [*batches, planner.pull(worker_id, GROUP, rows[-1:], source[-1:], target[-1:])]


def handshake_bytes(scene: Scene) -> int:
    """Bytes of the answer with which a decode rank learns this prefill instance: who owns what, and where."""
    from pdlink.bootstrap.service_wire import pack_info

    return pack_info(_server_info(scene)).ByteSize()


def _server_info(scene: Scene) -> PrefillServerInfo:
    from pdlink.address import Address
    from pdlink.bootstrap.messages import PROTOCOL, PrefillServerInfo, RankInfo
    from pdlink.layout.fingerprint import fingerprint

    ranks = tuple(
        RankInfo(source.worker_id, 1, rank, scene.plan.owned[rank], source.regions, Address("127.0.0.1", 7401), {})
        for rank, source in zip(scene.plan.sizes.ranks(), scene.sources, strict=True)
    )
    return PrefillServerInfo(
        "prefill",
        PROTOCOL,
        scene.layout,
        fingerprint(scene.layout),
        scene.plan.sizes,
        dict(scene.plan.kinds),
        ranks,
    )
