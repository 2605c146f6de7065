"""Owns who provides what to one decode rank: for each (component, layer) that it wants, the prefill ranks it is pulled
from. A pure function of what both sides hold; addresses are the planner's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pdlink.errors import LayoutError, PlanError
from pdlink.layout.components import CacheLayout, Component
from pdlink.layout.page_slices import PageSlice, slice_page
from pdlink.layout.parts import WHOLE, Part


@dataclass(frozen=True, slots=True)
class Holder:
    """One prefill rank: the layers that it has of each component, and the part of each (all of it where not named)."""

    name: str
    owned: Mapping[str, Iterable[int]]
    parts: Mapping[str, Part] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Route:
    """A part of one (component, layer), and who provides it: `holder` counts in the list of holders.

    `slice` is what a source page gives (to the first turn, where tokens are spread).
    """

    component: str
    layer: int
    holder: int
    part: Part
    slice: PageSlice

    @property
    def nbytes(self) -> int:
        """Of one source page."""
        return self.slice.total_bytes


def find_routes(
    source: CacheLayout,
    holders: Sequence[Holder],
    destination: CacheLayout,
    wanted: Mapping[str, Sequence[int]],
    parts: Mapping[str, Part] | None = None,
    turn: int = 0,
) -> tuple[Route, ...]:
    """The routes of everything in `wanted` (component -> layers), in that order, parts by their heads.

    `parts` is what the decode rank holds of each component: all of it where not named. Every head of every wanted layer
    comes from one holder. Where several hold the same, the bytes are spread over them evenly; `turn` (the reader's
    index) decides ties, so that several readers do not all begin with the same one. Deterministic. Raises `PlanError`
    for a layer that nobody holds (all of), or that cannot be converted.
    """
    held: dict[tuple[str, int], dict[Part, list[int]]] = {}
    for number, holder in enumerate(holders):
        for name, layers in holder.owned.items():
            part = holder.parts.get(name, WHOLE)
            for layer in layers:
                held.setdefault((name, layer), {}).setdefault(part, []).append(number)
    choices: list[tuple[str, int, Part, PageSlice, list[int]]] = []
    for name, layers in wanted.items():
        here, part = destination.component(name), (parts or {}).get(name, WHOLE)
        there = _source_component(source, here)
        for layer in layers:
            found = held.get((name, layer))
            if not found:
                raise PlanError(f"{name!r} layer {layer} has no owner on the prefill side")
            choices += [(name, layer, *one) for one in _segments(there, here, layer, part, found)]
    return _spread(choices, len(holders), turn)


def _source_component(source: CacheLayout, here: Component) -> Component:
    try:
        return source.component(here.name)
    except LayoutError as error:
        raise PlanError(f"prefill: {error}") from error


def _segments(
    there: Component, here: Component, layer: int, wanted: Part, held: Mapping[Part, list[int]]
) -> list[tuple[Part, PageSlice, list[int]]]:
    """What each held part gives, by heads. All that is wanted must come out, once."""
    found, taken = [], 0
    heads = wanted.heads(here.model_heads)
    for part in sorted(held, key=lambda one: (one.head_count, one.head_index)):
        try:
            given = slice_page(there, part, here, wanted)
        except LayoutError as error:
            raise PlanError(str(error)) from error
        if given.num_runs:
            mine = part.heads(there.model_heads)
            taken += min(mine.stop, heads.stop) - max(mine.start, heads.start)
            found.append((part, given, held[part]))
    if taken != len(heads):
        raise PlanError(
            f"{here.name!r} layer {layer}: the prefill ranks hold {taken} of the {len(heads)} heads from {heads.start} "
            "on that this side wants; each of them must come from one part"
        )
    return found


def _spread(
    choices: Sequence[tuple[str, int, Part, PageSlice, list[int]]], num_holders: int, turn: int
) -> tuple[Route, ...]:
    """What has one holder first, then the largest, each to whoever has least by then."""
    load = [0] * num_holders
    chosen = [0] * len(choices)
    order = sorted(range(len(choices)), key=lambda at: (len(choices[at][4]) > 1, -choices[at][3].total_bytes))
    for at in order:
        *_, given, numbers = choices[at]
        first = turn % len(numbers)
        chosen[at] = min(numbers[first:] + numbers[:first], key=load.__getitem__)
        load[chosen[at]] += given.total_bytes
    return tuple(
        Route(name, layer, chosen[at], part, given) for at, (name, layer, part, given, _) in enumerate(choices)
    )
