"""Owns the figures that `pdlink bench transfer` is to reach: the cases that they speak of, and what a row says of each.

Goals are ratios of one run, because absolute rates are those of a machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdlink.cli.transfer_case import CUDA, HOST, Case
from pdlink.cli.transfer_row import Row, over

COLUMNS = ("ratio", "measured", "goal", "reached")
LEFT = 1
HOST_SHAPE = (65_536, 256, 4)
CUDA_SHAPE = (41_984, 512, 39)
"""Page bytes, pages and layers of the cases that goals speak of. 41,984 B are 64 tokens of 656 B."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A ratio of a row that is to be `at_least` so much; `unit` is what the ratio is of. None: it is only told."""

    ratio: str
    unit: str
    at_least: float | None
    is_factor: bool = False
    """Whether people get it as a factor, and not in percent."""

    def text(self, value: float) -> str:
        return f"{value:.1f}x" if self.is_factor else f"{value:.0%}"


RAW = Goal("of_raw", "the library with the same ranges", 0.95)
NVLINK_STAGED = Goal("of_raw_per_layer", "the library with one range a layer", 0.80)


def cases(device: str) -> list[Case]:
    """The cases that there are goals for, those of one link together."""
    nbytes, pages, layers = CUDA_SHAPE if device == CUDA else HOST_SHAPE
    wanted: Sequence[tuple[str, str, str, bool]]
    if device == CUDA:
        wanted = (
            ("ipc", "nvlink", "mapped", True),
            *(("nixl", "nvlink", way, True) for way in ("direct", "staged")),
            *(("mooncake", "nvlink_intra", way, True) for way in ("direct", "staged")),
        )
    else:
        wanted = (
            *(("ipc", "shm", "mapped", scattered) for scattered in (True, False)),
            *(("nixl", "cma", "direct", scattered) for scattered in (True, False)),
            *(("nixl", "tcp", "direct", scattered) for scattered in (True, False)),
            *(("mooncake", "tcp", "direct", scattered) for scattered in (True, False)),
            ("mooncake", "tcp", "staged", True),
        )
    return [
        Case(backend, transport, way, nbytes, pages, layers, scattered, device)
        for backend, transport, way, scattered in wanted
    ]


def goals_of(row: Row) -> Iterator[Goal]:
    """What the row is to reach. A row of another shape than the goals speak of has those that hold for any."""
    staged, backend = row["way"] == "staged", row["backend"]
    if not staged:
        yield RAW
    shape = (row["page_bytes"], row["num_pages"], row["num_layers"])
    large = Goal("of_raw_large_range", "the library's best large range", None)
    if row["device"] == HOST and shape == HOST_SHAPE:
        if backend == "ipc" and not row["scattered"]:
            yield Goal(large.ratio, "memcpy of large ranges", 0.80)
        elif backend == "nixl" and row["scattered"] and not staged:
            yield Goal(large.ratio, large.unit, 0.90 if row["transport"] == "tcp" else None)
        elif backend == "mooncake" and row["scattered"]:
            yield Goal(large.ratio, large.unit, 0.75)
    if row["device"] == CUDA and shape == CUDA_SHAPE and row["scattered"]:
        if backend == "ipc" and not staged:
            yield Goal(large.ratio, "a plain peer copy", 0.85)
        elif staged:
            yield NVLINK_STAGED
            if backend == "nixl":
                yield Goal("of_raw_one_post", "the library with the same ranges in one post", 40.0, is_factor=True)
                yield Goal("of_raw", "the same, in posts of the best size", None, is_factor=True)
            else:
                yield Goal("of_raw", "the library with the same ranges", 20.0, is_factor=True)


def judged(row: Row) -> list[dict[str, object]]:
    """The row's goals as JSON: the name of the ratio, the goal (null: it is only told), and whether it is reached."""
    return [
        {
            "ratio": goal.ratio,
            "at_least": goal.at_least,
            "reached": None if goal.at_least is None else row[goal.ratio] >= goal.at_least,
        }
        for goal in goals_of(row)
    ]


def as_text(row: Row) -> Iterator[Sequence[str]]:
    """The cells of `COLUMNS`, one line for each goal."""
    how = "scattered" if row["scattered"] else "contiguous"
    for goal in goals_of(row):
        value, least = row[goal.ratio], goal.at_least
        said = f"{over(row)}, {how}: of {goal.unit}"
        verdict = "" if least is None else "yes" if value >= least else "no"
        yield said, goal.text(value), "" if least is None else goal.text(least), verdict
