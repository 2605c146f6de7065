"""Owns parallel sizes and rank coordinates (dp, pp, cp, tp). It knows nothing of layers or processes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
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


def read_sizes(text: str, axes: Sequence[str] = AXES) -> dict[str, int]:
    """`pp2cp4` -> {"pp": 2, "cp": 4}: sizes as they are written, for axes in any order, each once at most.

    Raises `LayoutError` for other text, an axis that is not one of `axes`, and a size below 1.
    """
    found: dict[str, int] = {}
    if not re.fullmatch(r"([a-z]+[0-9]{1,9})+", text):
        example = "".join(f"{axis}{size}" for axis, size in zip(axes[1:], (2, 4), strict=False))
        raise LayoutError(f"{text!r} is no list of sizes; write each as axis and number, like {example}")
    for axis, digits in re.findall(r"([a-z]+)([0-9]{1,9})", text):
        if axis not in axes:
            raise LayoutError(f"{text!r} has an axis {axis!r}; there are {', '.join(axes)}")
        if axis in found:
            raise LayoutError(f"{text!r} names {axis} twice")
        if int(digits) < 1:
            raise LayoutError(f"{text!r} has {axis}={int(digits)}, which must be at least 1")
        found[axis] = int(digits)
    return found
