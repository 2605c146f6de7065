"""Owns where decode ranks stand and what each holds: sizes, the plan of a whole instance, one rank's place in it.

A decode side has axes of its own: `pp` cuts the layers, `tp` splits heads and repeats everything else, and `dcp` lets
neighbouring tp ranks that hold the same heads share the tokens: rank d of them keeps tokens t with t mod dcp == d.
`dcp` divides `tp`, as engines carve those groups out of the tensor-parallel one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

from pdlink.errors import LayoutError
from pdlink.layout.components import CacheLayout, Component
from pdlink.layout.layer_plan import LayerPlan, OwnedLayers, PlanKind
from pdlink.layout.parallel import ParallelSizes, RankCoordinates
from pdlink.layout.parts import Part, part_of
from pdlink.layout.readers import ReaderSet


@dataclass(frozen=True, slots=True, order=True)
class DecodeRank:
    """One decode rank's place along each axis, each from 0."""

    dp: int = 0
    pp: int = 0
    tp: int = 0

    def __post_init__(self) -> None:
        for one in fields(self):
            if getattr(self, one.name) < 0:
                raise LayoutError(f"decode rank coordinate {one.name}={getattr(self, one.name)} must not be negative")

    def __str__(self) -> str:
        return f"dp{self.dp}.pp{self.pp}.tp{self.tp}"


@dataclass(frozen=True, slots=True)
class DecodeSizes:
    """How many ranks a decode instance has along each axis; `dcp` of the `tp` ranks share tokens. Raises
    `LayoutError`."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    dcp: int = 1

    def __post_init__(self) -> None:
        for one in fields(self):
            if getattr(self, one.name) < 1:
                raise LayoutError(f"decode size {one.name}={getattr(self, one.name)} must be at least 1")
        if self.tp % self.dcp:
            raise LayoutError(f"dcp={self.dcp} does not divide tp={self.tp}: its groups are parts of the tp group")

    @property
    def num_ranks(self) -> int:
        return self.dp * self.pp * self.tp

    @property
    def num_readers(self) -> int:
        """Ranks that pull one request: those of a dp group."""
        return self.pp * self.tp

    def ranks(self) -> Iterator[DecodeRank]:
        """Every rank, tp fastest, then pp, then dp."""
        for dp in range(self.dp):
            for pp in range(self.pp):
                for tp in range(self.tp):
                    yield DecodeRank(dp, pp, tp)

    def check(self, rank: DecodeRank) -> None:
        """Raise `LayoutError` when `rank` lies outside these sizes."""
        for axis in ("dp", "pp", "tp"):
            if getattr(rank, axis) >= getattr(self, axis):
                raise LayoutError(
                    f"decode rank coordinate {axis}={getattr(rank, axis)} is outside decode size "
                    f"{axis}={getattr(self, axis)}"
                )

    def __str__(self) -> str:
        return f"dp{self.dp}pp{self.pp}tp{self.tp}" + (f"dcp{self.dcp}" if self.dcp > 1 else "")


@dataclass(frozen=True, slots=True)
class DecodePlace:
    """Where one decode rank stands, and the layers that it holds (None: all that its layout has).

    The default is a rank alone, which holds everything. Raises `LayoutError`.
    """

    sizes: DecodeSizes = field(default_factory=DecodeSizes)
    rank: DecodeRank = field(default_factory=DecodeRank)
    owned: OwnedLayers | None = None

    def __post_init__(self) -> None:
        self.sizes.check(self.rank)

    @property
    def index(self) -> int:
        """Among the readers of a request."""
        return self.rank.pp * self.sizes.tp + self.rank.tp

    def readers(self, instance: str) -> ReaderSet:
        """The reader set of its requests. Ranks of another dp group are of another set: `instance` names one group."""
        return ReaderSet(instance, self.index, self.sizes.num_readers)

    def part(self, component: Component) -> Part:
        """What its pages hold of a component. Raises `LayoutError` where the sizes do not fit the component."""
        return part_of(component, self.rank.tp, self.sizes.tp, self.sizes.dcp)

    def parts(self, layout: CacheLayout) -> dict[str, Part]:
        return {one.name: self.part(one) for one in layout.components}

    def layers(self, layout: CacheLayout) -> dict[str, tuple[int, ...]]:
        """Component -> the layers that it holds, for every component of `layout`. Raises `LayoutError` for others."""
        if self.owned is None:
            return {one.name: one.layers for one in layout.components}
        found = {one.name: tuple(sorted(self.owned.get(one.name, ()))) for one in layout.components}
        for name, ids in self.owned.items():
            strange = sorted(set(ids) - set(layout.component(name).layers))
            if strange:
                raise LayoutError(f"decode rank {self.rank} holds {name!r} layers {strange} that the layout lacks")
        return found


@dataclass(frozen=True)
class DecodePlan:
    """The layers of every rank of a decode instance. tp ranks of a stage hold the same layers."""

    sizes: DecodeSizes
    owned: Mapping[DecodeRank, OwnedLayers]

    @classmethod
    def balanced(cls, layout: CacheLayout, sizes: DecodeSizes, stage_starts: Sequence[int] | None = None) -> DecodePlan:
        """Stages balanced, or starting at `stage_starts`; draft layers are on the last one."""
        stages = LayerPlan.balanced(layout, ParallelSizes(pp=sizes.pp), PlanKind.SPLIT, stage_starts)
        return cls(sizes, {rank: stages.owned[RankCoordinates(pp=rank.pp)] for rank in sizes.ranks()})

    def place(self, rank: DecodeRank) -> DecodePlace:
        return DecodePlace(self.sizes, rank, self.owned[rank])
