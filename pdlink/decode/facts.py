"""Owns what a decode worker knows of itself: its layout and regions, where it stands, and so what it wants of whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pdlink.bootstrap.messages import PrefillServerInfo
from pdlink.errors import InvalidInput
from pdlink.layout.components import CacheLayout
from pdlink.layout.decode_plan import DecodePlace
from pdlink.layout.parts import Part, part_of
from pdlink.layout.regions import Region, check_region
from pdlink.transfer.planner import PullPlanner, Source


@dataclass(frozen=True)
class DecodeFacts:
    """`layout` describes the pages of this rank; `regions` is where they lie. Raises `LayoutError` for regions that the
    layout or `place` does not have, and for a place whose sizes do not fit the layout."""

    layout: CacheLayout
    regions: tuple[Region, ...]
    place: DecodePlace = field(default_factory=DecodePlace)

    def __post_init__(self) -> None:
        for region in self.regions:
            check_region(region, self.layout)
        self.parts, self.place.layers(self.layout)  # which refuse what does not fit

    @cached_property
    def parts(self) -> dict[str, Part]:
        """What pages here hold of each component."""
        return self.place.parts(self.layout)

    @cached_property
    def region_of(self) -> dict[tuple[str, int], Region]:
        return {(region.component, region.layer): region for region in self.regions}

    @cached_property
    def pool_pages(self) -> dict[str, int]:
        """Pages that every region of a page group has."""
        pages: dict[str, int] = {}
        for region in self.regions:
            group = self.layout.component(region.component).page_group
            pages[group] = min(pages.get(group, region.num_pages), region.num_pages)
        return pages

    def planner(self, info: PrefillServerInfo, dp: int) -> PullPlanner:
        """What is pulled from each rank of dp group `dp` of an instance.

        Raises `InvalidInput` when there is no such group, and `PlanError` for what cannot be had of it.
        """
        if not 0 <= dp < info.sizes.dp:
            raise InvalidInput(f"dp={dp} is outside the {info.sizes.dp} dp groups of {info.instance!r}")
        return PullPlanner(
            self.layout,
            sources(info, dp),
            self.regions,
            source_layout=info.layout,
            owned=self.place.owned,
            parts=self.parts,
            turn=self.place.index,
        )


def sources(info: PrefillServerInfo, dp: int) -> Sequence[Source]:
    """The ranks of a dp group, and what the pages of each hold."""
    tp_size = info.sizes.tp
    layouts = [info.layout_of(tp) for tp in range(tp_size)]
    parts = [{one.name: part_of(one, tp, tp_size) for one in layouts[tp].components} for tp in range(tp_size)]
    return [
        Source(rank.worker_id, rank.regions, parts[rank.coordinates.tp], layouts[rank.coordinates.tp])
        for rank in info.ranks
        if rank.coordinates.dp == dp
    ]
