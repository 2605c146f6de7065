"""Owns what the decode tests share: owners at made-up addresses, what each publishes, and a merge over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from pdlink.config import Settings
from pdlink.control.frames import Ready
from pdlink.decode.actions import Action, MergePlan, Send
from pdlink.decode.merge import Merge
from pdlink.decode.request import ReceiveRequest, build_request
from pdlink.layout.components import CacheLayout, index_k, latent
from pdlink.layout.layer_plan import LayerPlan, PlanKind
from pdlink.layout.parallel import ParallelSizes
from pdlink.layout.readers import ReaderSet
from pdlink.layout.regions import Region
from pdlink.transfer.planner import PullPlanner, Source

BodyT = TypeVar("BodyT")
PAGE_SIZE = 64
NUM_PAGES = 32
INCARNATION = 7
Cells = Mapping[str, tuple[int, ...]]


def make_layout(num_layers: int) -> CacheLayout:
    parts = (latent(PAGE_SIZE, range(num_layers), bytes_per_token=656), index_k(PAGE_SIZE, range(0, num_layers, 2)))
    return CacheLayout(num_layers, parts)


def make_regions(layout: CacheLayout, owned: Cells, base: int) -> tuple[Region, ...]:
    cells = [(name, layer) for name, ids in owned.items() for layer in ids]
    made = []
    for number, (name, layer) in enumerate(cells):
        nbytes = layout.component(name).page_bytes
        made.append(Region(name, layer, base + (number << 24), nbytes, nbytes, NUM_PAGES))
    return tuple(made)


def make_plan(layout: CacheLayout, cp: int, kind: PlanKind = PlanKind.SPLIT) -> tuple[MergePlan, dict[str, Cells]]:
    """The merge plan of a cp instance, and what each of its ranks owns."""
    sizes = ParallelSizes(cp=cp)
    layers = LayerPlan.balanced(layout, sizes, kind)
    owned: dict[str, Cells] = {f"r{rank.cp}": dict(cells) for rank, cells in layers.owned.items()}
    sources = [
        Source(name, make_regions(layout, cells, (number + 2) << 40))
        for number, (name, cells) in enumerate(owned.items())
    ]
    whole = {one.name: one.layers for one in layout.components}
    planner = PullPlanner(layout, sources, make_regions(layout, whole, 1 << 40))
    last = max(name for name, cells in owned.items() if layout.num_layers - 1 in cells["latent"])
    if kind is PlanKind.REPLICATED:
        last = "r0"
    return MergePlan(planner, dict.fromkeys(owned, INCARNATION), last), owned


def make_request(layout: CacheLayout, pages: Sequence[int], first_page: int = 0, expect_aux: bool = False):
    """A request for `pages` at positions from `first_page` on."""
    end = (first_page + len(pages)) * PAGE_SIZE
    return build_request(
        layout,
        "t",
        {"kv": list(pages)},
        max(1, end),
        prefix_tokens=first_page * PAGE_SIZE,
        readers=ReaderSet("dec"),
        expect_aux=expect_aux,
    )


def ready(
    sequence: int,
    pages: Sequence[int],
    layers: Cells,
    *,
    start_page: int = 0,
    last: bool = False,
    aux: bytes | None = None,
    generation: int | None = None,
) -> Ready:
    ids = np.array(pages, dtype=np.int64)
    return Ready(sequence, "kv", start_page, ids, layers, generation or 100 + sequence, last, aux)


class Wait:
    """A merge whose owners are known, and a clock for it. `take` empties its actions."""

    def __init__(self, request: ReceiveRequest, plan: MergePlan, settings: Settings) -> None:
        self.now = 1000.0
        self.plan = plan
        self.merge = Merge(request, settings, self.now)
        self.actions: list[Action] = []

    def resolve(self) -> Wait:
        self.merge.on_resolved(self.plan, self.now)
        return self

    def take(self, kind: type[BodyT]) -> list[BodyT]:
        """The actions of one kind since they were last taken; the others stay."""
        self.actions += self.merge.drain()
        chosen = [one for one in self.actions if isinstance(one, kind)]
        self.actions = [one for one in self.actions if not isinstance(one, kind)]
        return chosen

    def sent(self, kind: type[BodyT]) -> dict[str, BodyT]:
        """Worker id -> the body of one kind that was sent to it, since sends were last looked at."""
        return {one.worker_id: one.body for one in self.take(Send) if isinstance(one.body, kind)}

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.merge.tick(self.now)
