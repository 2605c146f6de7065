"""Owns the plan of one page group: its rows, who serves each, and the tables of addresses on both sides. It holds no
request state and chooses nobody (see `routes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pdlink.errors import PlanError
from pdlink.layout.components import CacheLayout
from pdlink.layout.page_slices import PageSlice, slice_page
from pdlink.layout.parts import WHOLE, Part
from pdlink.layout.regions import Region
from pdlink.transfer.descriptors import Int64Array, LayerTable
from pdlink.transfer.kept import Kept
from pdlink.transfer.packing import Landing, PageTable, runs_of
from pdlink.transfer.routes import Route

MAX_ROW_SETS = 64
"""Kept of one page group: as many as there are owners, and ranges of layers that they publish alone."""


@dataclass(frozen=True, slots=True, eq=False)
class RowSet:
    """Rows of a page group that are pulled together, with all that is the same for every request.

    `cells` are their (component, layer); `owner` indexes the planner's source that serves them all, -1 where that is
    not one. `tables` has their addresses by turn, and `landing` how packed pages become pages here, None where pages go
    whole. Each has at least `num_source` pages there and `num_destination` here.
    """

    cells: tuple[tuple[str, int], ...]
    owner: int
    tables: tuple[LayerTable, ...]
    landing: Landing | None
    num_source: int
    num_destination: int


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """One page group: its rows, who serves each, and the addresses on both sides.

    `owner[i]` indexes the planner's sources; `source_pages[i]` and `destination_pages[i]` are the page counts of the
    two regions of row i, and `row_bytes[i]` what one source page gives. Where pages do not go whole, row i is the runs
    [starts[i], starts[i + 1]) of every table; without `starts` it is one. A page here is made of as many source pages
    as there are `tables`, which take turns: page position p is turn p mod that. `parts` is what this side holds of the
    components of which pages do not go whole, by row.
    """

    name: str
    cells: tuple[tuple[str, int], ...]
    owner: Int64Array
    tables: tuple[LayerTable, ...]
    starts: Int64Array | None
    row_bytes: Int64Array
    source_pages: Int64Array
    destination_pages: Int64Array
    parts: tuple[Part | None, ...]
    _row_sets: Kept[bytes, RowSet] = field(default_factory=lambda: Kept(MAX_ROW_SETS))

    def row_set(self, rows: Int64Array) -> RowSet:
        """What is known of `rows`, at least one. The same rows give the same object, so that backends know what they
        have checked."""
        return self._row_sets.of(rows.tobytes(), lambda: self._make_row_set(rows))

    @property
    def num_rows(self) -> int:
        return len(self.cells)

    @property
    def num_runs(self) -> Int64Array:
        """int64 [num_rows]"""
        return np.ones(self.num_rows, dtype=np.int64) if self.starts is None else np.diff(self.starts)

    @property
    def num_turns(self) -> int:
        return len(self.tables)

    def named(self, row: int) -> str:
        component, layer = self.cells[row]
        return f"{component!r} layer {layer}"

    def _make_row_set(self, rows: Int64Array) -> RowSet:
        runs, starts = (rows, None) if self.starts is None else runs_of(self.starts, rows)
        tables, owner = tuple(table.take(runs) for table in self.tables), self.owner[rows]
        return RowSet(
            tuple(self.cells[row] for row in rows.tolist()),
            int(owner[0]) if bool(np.all(owner == owner[0])) else -1,
            tables,
            self._landing(rows, tables, starts),
            int(self.source_pages[rows].min()),
            int(self.destination_pages[rows].min()),
        )

    def _landing(self, rows: Int64Array, tables: Sequence[LayerTable], starts: Int64Array | None) -> Landing | None:
        named = {self.cells[row][0]: self.parts[row] for row in rows.tolist()}
        parts = {name: part for name, part in named.items() if part}
        if not parts and self.num_turns == 1:
            return None
        landing = (PageTable(one.destination_base, one.destination_stride, one.page_bytes, starts) for one in tables)
        return Landing(tuple(landing), parts)


@dataclass(frozen=True)
class Cutter:
    """Cuts source pages into runs for pages of a layout, turn by turn."""

    destination: CacheLayout
    parts: Mapping[str, Part]

    def num_turns(self, component: str) -> int:
        return self.part(component).token_count

    def part(self, component: str) -> Part:
        return self.parts.get(component, WHOLE)

    def slice(self, route: Route, turn: int) -> PageSlice:
        if turn == 0:
            return route.slice
        here = self.destination.component(route.component)
        return slice_page(route.source, route.part, here, self.part(route.component), turn)


def build_group(
    name: str,
    routes: Sequence[Route],
    held: Sequence[Mapping[tuple[str, int], Region]],
    targets: Mapping[tuple[str, int], Region],
    cutter: Cutter,
) -> GroupPlan:
    """The plan of what `routes` bring, from what sources have `held` to the `targets`. Raises `PlanError`."""
    counts = {cutter.num_turns(one.component) for one in routes}
    if len(counts) > 1:
        raise PlanError(
            f"components of page group {name!r} are spread over {sorted(counts)} ranks by tokens, not alike"
        )
    (num_turns,) = counts
    sources = [held[one.holder][one.component, one.layer] for one in routes]
    for one in routes:
        if (one.component, one.layer) not in targets:
            raise PlanError(f"{one.component!r} layer {one.layer} has no region on the decode side")
    taken = [targets[one.component, one.layer] for one in routes]
    _check_page_bytes(routes, sources, taken, cutter)
    num_runs = np.array([one.slice.num_runs for one in routes], dtype=np.int64)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(num_runs)])
    return GroupPlan(
        name,
        tuple((one.component, one.layer) for one in routes),
        np.array([one.holder for one in routes], dtype=np.int64),
        tuple(
            _table([cutter.slice(one, turn) for one in routes], sources, taken, num_runs) for turn in range(num_turns)
        ),
        None if bool(np.all(num_runs == 1)) else starts,
        np.array([one.nbytes for one in routes], dtype=np.int64),
        np.array([one.num_pages for one in sources], dtype=np.int64),
        np.array([one.num_pages for one in taken], dtype=np.int64),
        tuple(None if one.slice.is_whole else cutter.part(one.component) for one in routes),
    )


def _table(
    slices: Sequence[PageSlice], sources: Sequence[Region], taken: Sequence[Region], num_runs: Int64Array
) -> LayerTable:
    def spread(values: Iterable[int]) -> Int64Array:
        return np.repeat(np.fromiter(values, dtype=np.int64, count=len(num_runs)), num_runs)

    return LayerTable(
        np.repeat(np.arange(len(num_runs), dtype=np.int64), num_runs),
        spread(one.base_address for one in sources) + np.concatenate([one.source for one in slices]),
        spread(one.page_stride for one in sources),
        spread(one.base_address for one in taken) + np.concatenate([one.destination for one in slices]),
        spread(one.page_stride for one in taken),
        np.concatenate([one.nbytes for one in slices]),
    )


def _check_page_bytes(
    routes: Sequence[Route], sources: Sequence[Region], taken: Sequence[Region], cutter: Cutter
) -> None:
    """Regions hold pages as the layouts describe them."""
    for route, source, target in zip(routes, sources, taken, strict=True):
        there, here = route.source, cutter.destination.component(route.component)
        if (source.page_bytes, target.page_bytes) != (there.page_bytes, here.page_bytes):
            raise PlanError(
                f"{route.component!r} layer {route.layer} has page_bytes={source.page_bytes} on prefill and "
                f"{target.page_bytes} on decode; use the same cache storage format on both"
            )


def check_range(side: str, pages: Int64Array, limits: Int64Array, plan: GroupPlan, rows: Int64Array, who: str) -> None:
    """Raise `PlanError` unless `pages` lie within the page counts (`limits`) of `rows`."""
    low, high = int(pages.min()), int(pages.max())
    if low < 0 or high >= int(limits.min()):
        component, layer = plan.cells[int(rows[int(np.argmin(limits))])]
        raise PlanError(
            f"{side} page {low if low < 0 else high} is outside the {int(limits.min())} pages of {component!r} layer "
            f"{layer} at {who}"
        )
