"""Owns the table that says which rank of one shard group has a layer, and the bytes that follow from it. No memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdlink.errors import LayoutError
from pdlink.layout import CacheLayout, LayerPlan, OwnedLayers, RankCoordinates
from pdlink.memory.forward import LayerKey, digest63

EVERYONE = -1
"""Owner of a layer that every rank of the shard group has (a replicated component)."""


@dataclass(frozen=True)
class ShardOwners:
    """(component, global layer id) -> rank inside the shard group (its cp coordinate), or `EVERYONE`.

    Layers of other pipeline stages are absent. `num_ranks` is the size of the group. Raises `LayoutError` for an
    owner outside it.
    """

    table: Mapping[LayerKey, int]
    num_ranks: int

    def __post_init__(self) -> None:
        for (component, layer), rank in self.table.items():
            if not EVERYONE <= rank < self.num_ranks:
                raise LayoutError(
                    f"owner {rank} of {component!r} layer {layer} is outside a shard group of {self.num_ranks} ranks"
                )

    @classmethod
    def of(cls, layout: CacheLayout, plan: LayerPlan, rank: RankCoordinates) -> ShardOwners:
        """The table of the shard group that `rank` belongs to. Raises `LayoutError` when the plan is not whole."""
        plan.check(layout)
        table = {}
        for component, layer in layout.cells():
            group = [one.cp for one in plan.owners(component, layer, rank.dp, rank.tp) if one.pp == rank.pp]
            if group:
                table[component, layer] = group[0] if len(group) == 1 < plan.sizes.cp else EVERYONE
        return cls(table, plan.sizes.cp)

    def of_rank(self, rank: int) -> OwnedLayers:
        """What `rank` of the group owns."""
        owned: dict[str, list[int]] = {}
        for (component, layer), owner in sorted(self.table.items()):
            if owner in (rank, EVERYONE):
                owned.setdefault(component, []).append(layer)
        return {component: tuple(layers) for component, layers in owned.items()}

    def remote_components(self, rank: int) -> frozenset[str]:
        """Components of which `rank` reads at least one layer from another rank."""
        return frozenset(component for (component, _), owner in self.table.items() if owner not in (rank, EVERYONE))

    def split_components(self) -> tuple[str, ...]:
        """Components with at least one split layer, sorted."""
        return tuple(sorted({key[0] for key in self.table if self.is_split(key)}))

    def check_owned(self, rank: int, owned: OwnedLayers) -> None:
        """Raise `LayoutError` unless `owned` is what `rank` owns by this table."""
        table = self.of_rank(rank)
        for name in sorted({*owned, *table}):
            if tuple(sorted(owned.get(name, ()))) != table.get(name, ()):
                raise LayoutError(
                    f"shard rank {rank} is to own {name!r} layers {list(owned.get(name, ()))}, the owner table says "
                    f"{list(table.get(name, ()))}"
                )

    def is_split(self, key: LayerKey) -> bool:
        """Whether exactly one rank of several has the layer, so that the others must fetch it.

        False for a layer of another stage: no rank of the group has that."""
        return self.num_ranks > 1 and self.table.get(key, EVERYONE) != EVERYONE

    def owner(self, key: LayerKey) -> int:
        """Rank inside the shard group, or `EVERYONE`. Raises `LayoutError` for a layer of another stage."""
        try:
            return self.table[key]
        except KeyError:
            raise LayoutError(f"no rank of this shard group has {key[0]!r} layer {key[1]}") from None

    @property
    def digest(self) -> int:
        """63 bits over the table."""
        return digest63(repr((self.num_ranks, sorted(self.table.items()))).encode())


def owned_nbytes(layout: CacheLayout, owned: OwnedLayers, num_pages: int) -> int:
    """Bytes of the owned regions of one rank: every page of every layer that it owns."""
    return sum(layout.component(name).page_bytes * num_pages * len(layers) for name, layers in owned.items())


def scratch_nbytes(layout: CacheLayout, owners: ShardOwners, rank: int, num_pages: int, scratch_slots: int) -> int:
    """Bytes of the scratch buffers of one rank: `scratch_slots` whole layers of each component that it reads remotely.

    They have room for every page, because a page keeps its position in them.
    """
    return sum(layout.component(name).page_bytes * num_pages * scratch_slots for name in owners.remote_components(rank))
