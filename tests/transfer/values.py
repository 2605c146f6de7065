"""Owns the planners that the transfer tests share. Regions have made-up addresses: nothing here is read or written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pdlink.layout import CacheLayout, LayerPlan, ParallelSizes, PlanKind, Region
from pdlink.layout.components import index_k, latent
from pdlink.transfer.planner import PullPlanner, Source

SPACING = 1 << 33


def ints(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), dtype=np.int64)


def make_layout(
    num_layers: int, indexed: Iterable[int] | None = None, *, own_group: bool = False, page_size: int = 64
) -> CacheLayout:
    """`indexed` are the layers with an indexer; `own_group` gives it a page group of half the page size."""
    layers = range(num_layers) if indexed is None else indexed
    keys = index_k(page_size // 2 if own_group else page_size, layers)
    if own_group:
        keys = replace(keys, page_group="index")
    return CacheLayout(num_layers, (latent(page_size, range(num_layers), bytes_per_token=656), keys))


def make_regions(
    layout: CacheLayout, owned: Mapping[str, Iterable[int]], start: int, num_pages: int, gap: int = 0
) -> tuple[Region, ...]:
    regions = []
    for name, layers in owned.items():
        nbytes = layout.component(name).page_bytes
        for layer in layers:
            base = start + SPACING * len(regions)
            regions.append(Region(name, layer, base, nbytes + gap, nbytes, num_pages))
    return tuple(regions)


@dataclass(frozen=True)
class Pair:
    """A prefill instance and a decode pool, both of `num_pages` pages."""

    layout: CacheLayout
    plan: LayerPlan
    num_pages: int = 64
    gap: int = 0

    @classmethod
    def of(
        cls,
        layout: CacheLayout,
        sizes: ParallelSizes | None = None,
        kind: PlanKind = PlanKind.SPLIT,
        num_pages: int = 64,
        gap: int = 0,
    ) -> Pair:
        return cls(layout, LayerPlan.balanced(layout, sizes or ParallelSizes(cp=2), kind), num_pages, gap)

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        return tuple(
            Source(f"w{number}", make_regions(self.layout, owned, (number + 1) << 44, self.num_pages, self.gap))
            for number, owned in enumerate(self.plan.owned.values())
        )

    @cached_property
    def destination(self) -> tuple[Region, ...]:
        every = {one.name: one.layers for one in self.layout.components}
        return make_regions(self.layout, every, 1 << 52, self.num_pages)

    @cached_property
    def planner(self) -> PullPlanner:
        return PullPlanner(self.layout, self.sources, self.destination)

    def pull_all(self, source_pages: Mapping[str, Iterable[int]], pages: Mapping[str, Iterable[int]]) -> list:
        """One batch for each owner and page group."""
        return [
            self.planner.pull(
                worker_id, group, self.planner.rows(worker_id, group), ints(source_pages[group]), ints(pages[group])
            )
            for worker_id in self.planner.worker_ids
            for group in self.planner.groups
        ]
