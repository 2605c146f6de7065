"""Owns who pulls what from whom between two whole instances: a pure function of their layouts and plans.

It is what every decode rank's planner comes to, without addresses, for whoever wants to see or check it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdlink.layout.components import CacheLayout
from pdlink.layout.decode_plan import DecodePlace, DecodePlan, DecodeRank
from pdlink.layout.layer_plan import LayerPlan
from pdlink.layout.parallel import RankCoordinates
from pdlink.layout.parts import part_of
from pdlink.transfer.routes import Holder, Route, find_routes


@dataclass(frozen=True, slots=True)
class Share:
    """All that one decode rank pulls from one prefill rank.

    `routes` are per (component, layer); `layers` names the same layers.
    """

    source: RankCoordinates
    reader: DecodeRank
    routes: tuple[Route, ...]

    @property
    def layers(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, list[int]] = {}
        for one in self.routes:
            found.setdefault(one.component, []).append(one.layer)
        return {name: tuple(ids) for name, ids in found.items()}

    def nbytes(self, num_pages: Mapping[str, int]) -> int:
        """Bytes of a request of so many source pages (component -> pages)."""
        return sum(one.nbytes * num_pages.get(one.component, 0) for one in self.routes)

    def num_descriptors(self, num_pages: Mapping[str, int]) -> int:
        """Descriptors of the direct way, where no two pages are neighbours."""
        return sum(one.slice.num_runs * num_pages.get(one.component, 0) for one in self.routes)


def holders_of(layouts: Sequence[CacheLayout], plan: LayerPlan, dp: int = 0) -> dict[RankCoordinates, Holder]:
    """What each rank of one dp group of a prefill instance holds, in rank order. `layouts` are those of its tp ranks,
    or one for all. Raises `LayoutError` where tp does not fit the heads."""
    found = {}
    for rank in (one for one in sorted(plan.owned) if one.dp == dp):
        layout = layouts[rank.tp % len(layouts)]
        parts = {one.name: part_of(one, rank.tp, plan.sizes.tp) for one in layout.components}
        found[rank] = Holder(str(rank), plan.owned[rank], parts, layout)
    return found


def wanted_layers(
    destination: CacheLayout, layers: Mapping[str, tuple[int, ...]], source: CacheLayout
) -> dict[str, tuple[int, ...]]:
    """What of a decode rank's `layers` is pulled: all, but for draft components that prefill does not have."""
    theirs = {one.name for one in source.components}
    return {
        one.name: layers.get(one.name, ()) for one in destination.components if not one.is_draft or one.name in theirs
    }


def shares_of(
    source: CacheLayout,
    holders: Mapping[RankCoordinates, Holder],
    destination: CacheLayout,
    place: DecodePlace,
) -> tuple[Share, ...]:
    """What one decode rank at `place` pulls from each of `holders`, in their order; those that give nothing are left
    out. `destination` is the rank's own layout. Raises `PlanError` and `LayoutError` with why the two do not fit."""
    wanted = wanted_layers(destination, place.layers(destination), source)
    parts = place.parts(destination)
    routes = find_routes(source, tuple(holders.values()), destination, wanted, parts, place.index)
    each = [(rank, tuple(one for one in routes if one.holder == number)) for number, rank in enumerate(holders)]
    return tuple(Share(rank, place.rank, mine) for rank, mine in each if mine)


def pair(
    source: CacheLayout, plan: LayerPlan, destination: CacheLayout, decode: DecodePlan, dp: int = 0
) -> tuple[Share, ...]:
    """The shares of every decode rank of dp group 0, which stands for all of them, from prefill's group `dp`.

    By decode rank, then by prefill rank; pairs that move nothing are left out. Raises `PlanError` and `LayoutError`
    with why the two do not fit.
    """
    holders = holders_of([source], plan, dp)
    readers = (one for one in decode.sizes.ranks() if one.dp == 0)
    return tuple(share for reader in readers for share in shares_of(source, holders, destination, decode.place(reader)))
