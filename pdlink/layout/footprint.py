"""Owns how much KV memory a layer plan takes on each rank. Sums only; it allocates nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdlink.errors import LayoutError
from pdlink.layout.components import CacheLayout, Component
from pdlink.layout.layer_plan import LayerPlan, OwnedLayers
from pdlink.layout.parallel import RankCoordinates


@dataclass(frozen=True, slots=True)
class RankFootprint:
    """One rank: what it owns, what its scratch takes, and what it would take if it kept all layers of its stage."""

    rank: RankCoordinates
    owned: OwnedLayers
    owned_bytes: int
    scratch_bytes: int
    unsplit_bytes: int


@dataclass(frozen=True)
class Footprint:
    """The memory of a plan for `num_tokens` tokens at once. `num_pages` is per page group, reserved ones included."""

    num_tokens: int
    num_pages: dict[str, int]
    reserved_pages: int
    ranks: tuple[RankFootprint, ...]

    @property
    def owned_bytes(self) -> int:
        """Of the rank that owns most."""
        return max(rank.owned_bytes for rank in self.ranks)

    @property
    def scratch_bytes(self) -> int:
        """Of the rank with the most scratch."""
        return max(rank.scratch_bytes for rank in self.ranks)

    @property
    def unsplit_bytes(self) -> int:
        """Of the rank that would hold most."""
        return max(rank.unsplit_bytes for rank in self.ranks)


def measure(
    layouts: Sequence[CacheLayout],
    plan: LayerPlan,
    num_tokens: int,
    *,
    reserved_pages: int = 1,
    scratch_slots: int = 2,
) -> Footprint:
    """The footprint of `plan` with pools that hold `num_tokens` tokens beside `reserved_pages` pages of padding.
    `layouts` are those of the tp ranks, or one for all.

    Scratch is `scratch_slots` layers, at pool size, of each component of which another rank of the shard group owns
    layers. Raises `LayoutError` when `num_tokens` or `reserved_pages` is negative, or nothing is to be held.
    """
    if num_tokens < 1 or reserved_pages < 0 or scratch_slots < 0:
        raise LayoutError(
            f"num_tokens={num_tokens} must be at least 1, reserved_pages={reserved_pages} and "
            f"scratch_slots={scratch_slots} at least 0"
        )
    pages = {group.name: group.num_pages(num_tokens) + reserved_pages for group in layouts[0].page_groups}
    together: dict[tuple[int, int, int], dict[str, set[int]]] = {}
    for rank, owned in plan.owned.items():
        union = together.setdefault(rank.shard_group, {})
        for name, layers in owned.items():
            union.setdefault(name, set()).update(layers)

    def nbytes(component: Component, num_layers: int) -> int:
        return num_layers * pages[component.page_group] * component.page_bytes

    ranks = []
    for rank, owned in plan.owned.items():
        held = scratch = unsplit = 0
        for one in layouts[rank.tp % len(layouts)].components:
            mine, everyone = owned.get(one.name, ()), together[rank.shard_group].get(one.name, set())
            held += nbytes(one, len(mine))
            unsplit += nbytes(one, len(everyone))
            if len(everyone) > len(mine):
                scratch += nbytes(one, scratch_slots)
        ranks.append(RankFootprint(rank, owned, held, scratch, unsplit))
    return Footprint(num_tokens, pages, reserved_pages, tuple(ranks))
