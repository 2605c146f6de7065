"""Owns who has which layer: the plan of a whole instance and the check that it is whole. It holds no memory.

A plan is stated per component. `split`: each layer of a pipeline stage is on exactly one rank of every shard group.
`replicated`: every rank of the stage has all of the stage's layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pdlink.errors import LayoutError
from pdlink.layout.components import CacheLayout
from pdlink.layout.parallel import ParallelSizes, RankCoordinates

OwnedLayers = Mapping[str, tuple[int, ...]]
"""Component name -> global layer ids that one rank owns, increasing. A component owned nowhere may be missing."""


class PlanKind(StrEnum):
    SPLIT = "split"
    REPLICATED = "replicated"


def balanced_ranges(num_layers: int, num_parts: int) -> tuple[range, ...]:
    """Contiguous ranges over [0, num_layers): the first `num_layers % num_parts` parts hold one more."""
    if num_layers < 0 or num_parts < 1:
        raise LayoutError(f"cannot split {num_layers} layers over {num_parts} parts")
    base, extra = divmod(num_layers, num_parts)
    ranges, start = [], 0
    for part in range(num_parts):
        end = start + base + (1 if part < extra else 0)
        ranges.append(range(start, end))
        start = end
    return tuple(ranges)


@dataclass(frozen=True, slots=True)
class PlanFault:
    """Why a set of owned layers is not a whole plan, as one sentence."""

    component: str
    text: str


@dataclass(frozen=True)
class LayerPlan:
    """The layers of every rank of an instance.

    `kinds` says split or replicated per component; `owned` has an entry for every rank. Building one does not check
    that it is whole; `check` does. Raises `LayoutError` for a rank outside `sizes`.
    """

    sizes: ParallelSizes
    kinds: Mapping[str, PlanKind]
    owned: Mapping[RankCoordinates, OwnedLayers]

    def __post_init__(self) -> None:
        for rank in self.owned:
            self.sizes.check(rank)

    @classmethod
    def balanced(
        cls,
        layout: CacheLayout,
        sizes: ParallelSizes,
        kind: PlanKind = PlanKind.SPLIT,
        stage_starts: Sequence[int] | None = None,
    ) -> LayerPlan:
        """The default plan: stages balanced (or starting at `stage_starts`), split inside each stage.

        A component that lacks some layers follows the model's ranges, so a layer's components share one owner.
        Draft components are whole on the last cp rank of the last stage when split, as engines keep them there.
        """
        stages = _stages(layout.num_layers, sizes.pp, stage_starts)
        owned: dict[RankCoordinates, OwnedLayers] = {}
        for rank in sizes.ranks():
            stage = stages[rank.pp]
            mine = balanced_ranges(len(stage), sizes.cp)[rank.cp]
            model = range(stage.start + mine.start, stage.start + mine.stop)
            last = rank.pp == sizes.pp - 1 and rank.cp == sizes.cp - 1
            draft = range(layout.num_draft_layers if last else 0)
            if kind is PlanKind.REPLICATED:
                model = stage
                draft = range(layout.num_draft_layers if rank.pp == sizes.pp - 1 else 0)
            owned[rank] = {
                one.name: tuple(layer for layer in one.layers if layer in (draft if one.is_draft else model))
                for one in layout.components
            }
        return cls(sizes, {one.name: kind for one in layout.components}, owned)

    def owners(self, component: str, layer: int, dp: int = 0, tp: int = 0) -> tuple[RankCoordinates, ...]:
        """Ranks of one dp and tp coordinate that own the layer, in rank order."""
        return tuple(
            rank
            for rank, layers in sorted(self.owned.items())
            if rank.dp == dp and rank.tp == tp and layer in layers.get(component, ())
        )

    def check(self, layout: CacheLayout) -> None:
        """Raise `LayoutError` with the first fault unless this plan is whole for `layout`."""
        faults = find_faults(layout, self)
        if faults:
            more = f" (+{len(faults) - 1} more)" if len(faults) > 1 else ""
            raise LayoutError(f"layer plan is not whole: {faults[0].text}{more}")


def find_faults(layout: CacheLayout, plan: LayerPlan) -> tuple[PlanFault, ...]:
    """Every missing rank, gap and overlap of `plan`; empty when the instance is whole."""
    faults = [PlanFault("", f"rank {rank} has not registered") for rank in plan.sizes.ranks() if rank not in plan.owned]
    for rank, layers in plan.owned.items():
        faults += _unknown_layers(layout, rank, layers)
    columns: dict[tuple[int, int], list[tuple[RankCoordinates, OwnedLayers]]] = {}
    for rank in sorted(plan.owned):
        columns.setdefault((rank.dp, rank.tp), []).append((rank, plan.owned[rank]))
    for component in layout.components:
        if component.name not in plan.kinds:
            faults.append(PlanFault(component.name, f"component {component.name!r} states no plan"))
            continue
        for dp in range(plan.sizes.dp):
            for tp in range(plan.sizes.tp):
                faults += _column_faults(plan, component.name, component.layers, (dp, tp), columns.get((dp, tp), []))
    return tuple(faults)


def _unknown_layers(layout: CacheLayout, rank: RankCoordinates, layers: OwnedLayers) -> list[PlanFault]:
    faults = []
    known = {one.name: set(one.layers) for one in layout.components}
    for name, owned in layers.items():
        strange = sorted(set(owned) - known.get(name, set()))
        if strange:
            faults.append(PlanFault(name, f"rank {rank} owns {name!r} layers {strange} that the layout lacks"))
    return faults


def _column_faults(
    plan: LayerPlan,
    name: str,
    layers: tuple[int, ...],
    place: tuple[int, int],
    column: list[tuple[RankCoordinates, OwnedLayers]],
) -> list[PlanFault]:
    """Gaps and overlaps of one component along pp and cp; `column` has the ranks of one (dp, tp) `place` in order."""
    held: dict[int, list[RankCoordinates]] = {layer: [] for layer in layers}
    for rank, owned in column:
        for layer in owned.get(name, ()):
            held.setdefault(layer, []).append(rank)
    gaps = [layer for layer, ranks in held.items() if not ranks]
    faults = []
    if gaps:
        faults.append(
            PlanFault(name, f"{name!r} layers {compact_ids(gaps)} have no owner at dp{place[0]}.tp{place[1]}")
        )
    for layer, ranks in held.items():
        if plan.kinds[name] is PlanKind.SPLIT and len(ranks) > 1:
            both = " and ".join(str(rank) for rank in ranks)
            faults.append(PlanFault(name, f"{name!r} layer {layer} is owned by {both}; a split layer has one owner"))
        elif plan.kinds[name] is PlanKind.REPLICATED and ranks:
            stages = {rank.pp for rank in ranks}
            holders = {rank.cp for rank in ranks}
            if len(stages) > 1 or len(holders) != plan.sizes.cp:
                faults.append(
                    PlanFault(name, f"{name!r} layer {layer} is replicated on only {[str(rank) for rank in ranks]}")
                )
    return faults


def _stages(num_layers: int, pp: int, starts: Sequence[int] | None) -> tuple[range, ...]:
    if starts is None:
        return balanced_ranges(num_layers, pp)
    bounds = [*starts, num_layers]
    if len(starts) != pp or bounds[0] != 0 or any(b < a for a, b in itertools.pairwise(bounds)):
        raise LayoutError(
            f"stage starts {list(starts)} do not cut {num_layers} layers into pp={pp} stages; give {pp} increasing "
            "starts, the first of them 0"
        )
    return tuple(range(a, b) for a, b in itertools.pairwise(bounds))


def compact_ids(layers: Sequence[int]) -> str:
    """[0, 1, 2, 7] -> "0-2, 7", and "none" for no layers."""
    if not layers:
        return "none"
    text, start = [], None
    for here, after in zip(layers, [*layers[1:], None], strict=True):
        start = here if start is None else start
        if after != here + 1:
            text.append(f"{start}-{here}" if start != here else str(here))
            start = None
    return ", ".join(text)
