"""Owns who provides what to one decode rank: for each (component, layer) that it wants, the prefill ranks it is pulled
from. A pure function of what both sides hold; addresses are the planner's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pdlink.errors import LayoutError, PlanError
from pdlink.layout.components import CacheLayout, Component
from pdlink.layout.page_slices import PageSlice, slice_page
from pdlink.layout.parts import WHOLE, Part


@dataclass(frozen=True, slots=True)
class Holder:
    """One prefill rank: the layers that it has of each component, and the part of each (all of it where not named).

    `layout` is that of its pages, where ranks have pages of different heads.
    """

    name: str
    owned: Mapping[str, Iterable[int]]
    parts: Mapping[str, Part] = field(default_factory=dict)
    layout: CacheLayout | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """A part of one (component, layer), and who provides it: `holder` counts in the list of holders.

    `source` describes its pages, and `slice` is what one of them gives (to the first turn, where tokens are spread).
    """

    component: str
    layer: int
    holder: int
    part: Part
    source: Component
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
    held: dict[tuple[str, int], dict[tuple[Part, int], list[int]]] = {}
    layouts: dict[int, CacheLayout] = {}
    for number, holder in enumerate(holders):
        layout = holder.layout or source
        layouts[id(layout)] = layout
        for name, layers in holder.owned.items():
            key = holder.parts.get(name, WHOLE), id(layout)
            for layer in layers:
                held.setdefault((name, layer), {}).setdefault(key, []).append(number)
    choices: list[_Choice] = []
    for name, layers in wanted.items():
        here, part = destination.component(name), (parts or {}).get(name, WHOLE)
        sides = {number: _source_component(layout, here) for number, layout in layouts.items()}
        for layer in layers:
            found = held.get((name, layer))
            if not found:
                raise PlanError(f"{name!r} layer {layer} has no owner on the prefill side")
            alike = [(mine, sides[number], numbers) for (mine, number), numbers in found.items()]
            choices += [(name, layer, *one) for one in _segments(alike, here, layer, part)]
    return _spread(choices, len(holders), turn)


_Segment: TypeAlias = tuple[Part, Component, PageSlice, list[int]]
_Choice: TypeAlias = tuple[str, int, Part, Component, PageSlice, list[int]]
"""(component, layer, part, what its pages look like, what one gives, who has it)."""


def _source_component(source: CacheLayout, here: Component) -> Component:
    try:
        return source.component(here.name)
    except LayoutError as error:
        raise PlanError(f"prefill: {error}") from error


def _segments(
    held: Sequence[tuple[Part, Component, list[int]]], here: Component, layer: int, wanted: Part
) -> list[_Segment]:
    """What each held part gives, by heads. All that is wanted must come out, once."""
    found: list[_Segment] = []
    taken = 0
    heads = wanted.heads(here.model_heads)
    for part, there, numbers in sorted(held, key=lambda one: (one[0].head_count, one[0].head_index)):
        try:
            given = slice_page(there, part, here, wanted)
        except LayoutError as error:
            raise PlanError(str(error)) from error
        if given.num_runs:
            mine = part.heads(there.model_heads)
            taken += min(mine.stop, heads.stop) - max(mine.start, heads.start)
            found.append((part, there, given, numbers))
    if taken != len(heads):
        raise PlanError(
            f"{here.name!r} layer {layer}: the prefill ranks hold {taken} of the {len(heads)} heads from {heads.start} "
            "on that this side wants; each of them must come from one part"
        )
    return found


def _spread(choices: Sequence[_Choice], num_holders: int, turn: int) -> tuple[Route, ...]:
    """What has one holder first, then the largest, each to whoever has least by then."""
    load = [0] * num_holders
    chosen = [0] * len(choices)
    order = sorted(range(len(choices)), key=lambda at: (len(choices[at][5]) > 1, -choices[at][4].total_bytes))
    for at in order:
        *_, given, numbers = choices[at]
        first = turn % len(numbers)
        chosen[at] = min(numbers[first:] + numbers[:first], key=load.__getitem__)
        load[chosen[at]] += given.total_bytes
    return tuple(
        Route(name, layer, chosen[at], part, there, given)
        for at, (name, layer, part, there, given, _) in enumerate(choices)
    )
