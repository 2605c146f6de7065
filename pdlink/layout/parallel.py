"""Owns parallel sizes and rank coordinates (dp, pp, cp, tp). It knows nothing of layers or processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from pdlink.errors import LayoutError

AXES = ("dp", "pp", "cp", "tp")


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """How many ranks an instance has along each axis. Every size is at least 1, else `LayoutError`."""

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise LayoutError(f"parallel size {axis}={getattr(self, axis)} must be at least 1")

    @property
    def num_ranks(self) -> int:
        return self.dp * self.pp * self.cp * self.tp

    def ranks(self) -> Iterator[RankCoordinates]:
        """Every coordinate, tp fastest, then cp, pp, dp."""
        for dp in range(self.dp):
            for pp in range(self.pp):
                for cp in range(self.cp):
                    for tp in range(self.tp):
                        yield RankCoordinates(dp, pp, cp, tp)

    def check(self, rank: RankCoordinates) -> None:
        """Raise `LayoutError` when `rank` lies outside these sizes."""
        for axis in AXES:
            if getattr(rank, axis) >= getattr(self, axis):
                raise LayoutError(
                    f"rank coordinate {axis}={getattr(rank, axis)} is outside parallel size "
                    f"{axis}={getattr(self, axis)}"
                )

    def __str__(self) -> str:
        return "".join(f"{axis}{getattr(self, axis)}" for axis in AXES)


@dataclass(frozen=True, slots=True, order=True)
class RankCoordinates:
    """One rank's place along each axis, each from 0."""

    dp: int = 0
    pp: int = 0
    cp: int = 0
    tp: int = 0

    def __post_init__(self) -> None:
        for one in fields(self):
            if getattr(self, one.name) < 0:
                raise LayoutError(f"rank coordinate {one.name}={getattr(self, one.name)} must not be negative")

    @property
    def shard_group(self) -> tuple[int, int, int]:
        """(dp, pp, tp): the cp ranks that share it split one stage's layers among themselves."""
        return (self.dp, self.pp, self.tp)

    def __str__(self) -> str:
        return ".".join(f"{axis}{getattr(self, axis)}" for axis in AXES)
