"""Owns the pull plan of one pair of instances: which owner serves which (component, layer), and at which addresses.

It is built once per pair and reused by every request; it holds no request state (see `coverage`) and moves nothing.
A *row* is one (component, layer) that decode wants. Rows of a page group are numbered from 0; a *cell* is a row at one
page position of the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdlink.errors import PlanError
from pdlink.layout.components import CacheLayout
from pdlink.layout.regions import Region
from pdlink.transfer.descriptors import GroupMove, Int64Array, LayerTable, PullBatch, pair_pages


@dataclass(frozen=True)
class Source:
    """One prefill rank as the planner sees it: its name and the regions it owns, none for a rank that owns nothing."""

    worker_id: str
    regions: tuple[Region, ...]


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """One page group: its rows, who serves each, and the addresses on both sides.

    `owner[i]` indexes the planner's sources; `source_pages[i]` and `destination_pages[i]` are the page counts of the
    two regions of row i.
    """

    name: str
    cells: tuple[tuple[str, int], ...]
    owner: Int64Array
    table: LayerTable
    source_pages: Int64Array
    destination_pages: Int64Array

    @property
    def num_rows(self) -> int:
        return len(self.cells)


class PullPlanner:
    """Plans pulls from `sources` into `destination` for every layer of every component that both sides name.

    `wanted` narrows the components and layers (default: all that `layout` has, draft components only when
    `destination` has regions for them). A row that several sources own is given to one of them, spread evenly.
    Raises `PlanError` when a wanted row has no source or no destination, or page bytes differ, or two sources share a
    name, and `LayoutError` for a wanted component that the layout lacks. Immutable; safe to share between threads.
    """

    def __init__(
        self,
        layout: CacheLayout,
        sources: Sequence[Source],
        destination: Sequence[Region],
        wanted: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.layout = layout
        self.worker_ids = tuple(source.worker_id for source in sources)
        self._index = {worker_id: number for number, worker_id in enumerate(self.worker_ids)}
        if len(self._index) != len(self.worker_ids):
            raise PlanError(f"two prefill ranks share a name: {', '.join(self.worker_ids)}")
        targets = {(region.component, region.layer): region for region in destination}
        held: dict[tuple[str, int], list[tuple[int, Region]]] = {}
        for number, source in enumerate(sources):
            for region in source.regions:
                held.setdefault((region.component, region.layer), []).append((number, region))
        self._held = {cell: frozenset(number for number, _ in owners) for cell, owners in held.items()}
        chosen = _wanted(layout, wanted, targets, held)
        self.groups: dict[str, GroupPlan] = {}
        for group in layout.page_groups:
            cells = tuple((name, layer) for name in group.components for layer in chosen.get(name, ()))
            if cells:
                self.groups[group.name] = _group_plan(group.name, cells, held, targets)
        self._row_of = {cell: (plan.name, row) for plan in self.groups.values() for row, cell in enumerate(plan.cells)}

    @property
    def num_rows(self) -> dict[str, int]:
        """Rows per page group."""
        return {name: plan.num_rows for name, plan in self.groups.items()}

    def contributors(self) -> tuple[str, ...]:
        """Worker ids that serve at least one row; the others are subscribed and released all the same."""
        used = {int(number) for plan in self.groups.values() for number in plan.owner}
        return tuple(worker_id for number, worker_id in enumerate(self.worker_ids) if number in used)

    def rows(self, worker_id: str, group: str, layers: Mapping[str, Sequence[int]] | None = None) -> Int64Array:
        """int64: rows of `group` that `worker_id` serves, only those of `layers` when given.

        Layers that decode did not ask for, and rows that another replica serves, are left out. Raises `PlanError`
        when `layers` names a layer that the worker does not own.
        """
        number = self.number(worker_id)
        plan = self.groups.get(group)
        if plan is None:
            return np.zeros(0, dtype=np.int64)
        if layers is None:
            return np.flatnonzero(plan.owner == number).astype(np.int64)
        rows = []
        for name, ids in layers.items():
            for layer in ids:
                if number not in self._held.get((name, layer), ()):
                    raise PlanError(f"{worker_id} published {name!r} layer {layer}, which it does not own")
                where = self._row_of.get((name, layer))
                if where and where[0] == group and plan.owner[where[1]] == number:
                    rows.append(where[1])
        return np.array(sorted(set(rows)), dtype=np.int64)

    def pull(
        self, worker_id: str, group: str, rows: Int64Array, source_pages: Int64Array, destination_pages: Int64Array
    ) -> PullBatch:
        """A batch that moves page pairs (int64 [n] each) of `rows` from `worker_id`.

        Raises `PlanError` when a row is not served by the worker, or a page lies outside a region.
        """
        plan = self.groups.get(group)
        if plan is None:
            raise PlanError(f"nothing of page group {group!r} is wanted")
        if len(source_pages) != len(destination_pages):
            raise PlanError(f"{len(source_pages)} source pages do not pair with {len(destination_pages)} destinations")
        if bool(np.any(plan.owner[rows] != self.number(worker_id))):
            raise PlanError(f"{worker_id} does not serve all of the {len(rows)} rows asked of it")
        if not len(rows) or not len(source_pages):
            return PullBatch(worker_id, ())
        _check_range("source", source_pages, plan.source_pages[rows], plan, rows, worker_id)
        _check_range("destination", destination_pages, plan.destination_pages[rows], plan, rows, "this side")
        return PullBatch(
            worker_id, (GroupMove(group, pair_pages(source_pages, destination_pages), plan.table.take(rows)),)
        )

    def number(self, worker_id: str) -> int:
        """The index of a rank in `worker_ids`. Raises `PlanError` for a stranger."""
        try:
            return self._index[worker_id]
        except KeyError:
            raise PlanError(f"{worker_id} is not a rank of this prefill instance") from None


def check_batches(
    planner: PullPlanner, batches: Sequence[PullBatch], destination_pages: Mapping[str, Int64Array]
) -> None:
    """Raise `PlanError` unless `batches` write every asked cell exactly once, from a rank that owns it.

    `destination_pages` are the pages asked for per group, int64 and without repeats. The error names the first cell
    without a source or with several, or the first row whose source, addresses or pages are not those of its regions.
    """
    for batch in batches:
        for move in batch.moves:
            if move.group not in planner.groups:
                raise PlanError(f"{batch.worker_id} is asked for page group {move.group!r}, of which nothing is wanted")
    for name, plan in planner.groups.items():
        pages = destination_pages.get(name, np.zeros(0, dtype=np.int64))
        ordered = np.sort(pages)
        if bool(np.any(np.diff(ordered) == 0)):
            raise PlanError(f"page group {name!r} asks for a destination page twice")
        # A move of every asked page counts by row. Only other moves are counted by cell: a matrix of rows x pages.
        whole = np.zeros(plan.num_rows, dtype=np.int64)
        partial: list[tuple[Int64Array, npt.NDArray[np.uint8]]] = []
        for batch in batches:
            for move in batch.moves:
                if move.group == name and len(move.layers.rows):
                    _check_rows(planner, plan, batch.worker_id, move)
                    written = np.sort(move.runs.destination_pages())
                    if np.array_equal(written, ordered):
                        whole[move.layers.rows] += 1
                    else:
                        partial.append((move.layers.rows, _page_counts(written, ordered, name)))
        if not partial and bool(np.all(whole == 1)):
            continue
        # Counts stop at 2, so that no number of repeats can wrap around to 1.
        times = np.repeat(np.minimum(whole, 2).astype(np.uint8)[:, None], len(pages), axis=1)
        for rows, counts in partial:
            times[rows] = np.minimum(times[rows] + counts, 2)
        if bool(np.any(times != 1)):
            row, column = (int(one) for one in np.argwhere(times != 1)[0])
            how = "no source" if times[row, column] == 0 else "more than one source"
            raise PlanError(f"{_named(plan, row)}, destination page {int(ordered[column])} has {how}")


def _check_rows(planner: PullPlanner, plan: GroupPlan, worker_id: str, move: GroupMove) -> None:
    """Every row of the move is served by the worker, once, at the addresses and within the pages of its regions."""
    rows, table = move.layers.rows, plan.table
    if int(rows.min()) < 0 or int(rows.max()) >= plan.num_rows:
        raise PlanError(f"rows {int(rows.min())}..{int(rows.max())} are outside the {plan.num_rows} of {plan.name!r}")
    repeated = np.bincount(rows)
    if int(repeated.max()) > 1:
        raise PlanError(f"{_named(plan, int(repeated.argmax()))} is planned twice in one batch of {worker_id}")
    mine = plan.owner[rows] == planner.number(worker_id)
    if not bool(np.all(mine)):
        row = int(rows[int(np.argmin(mine))])
        serves = planner.worker_ids[int(plan.owner[row])]
        raise PlanError(f"{_named(plan, row)} is asked of {worker_id}, but {serves} serves it")
    for name in ("source_base", "source_stride", "destination_base", "destination_stride", "page_bytes"):
        found, right = getattr(move.layers, name), getattr(table, name)[rows]
        if not np.array_equal(found, right):
            at = int(np.argmin(found == right))
            raise PlanError(
                f"{_named(plan, int(rows[at]))} is planned with {name}={int(found[at]):#x}, its region has "
                f"{int(right[at]):#x}"
            )
    if move.runs.num_runs:
        _check_range("source", move.runs.source, plan.source_pages[rows], plan, rows, worker_id)
        last = move.runs.source + move.runs.count - 1
        _check_range("source", last, plan.source_pages[rows], plan, rows, worker_id)
        last = move.runs.destination + move.runs.count - 1
        _check_range("destination", last, plan.destination_pages[rows], plan, rows, "this side")


def _page_counts(written: Int64Array, ordered: Int64Array, group: str) -> npt.NDArray[np.uint8]:
    """uint8 [len(ordered)]: how often `written` (increasing) has each asked page, 2 standing for more."""
    where = np.searchsorted(ordered, written)
    strange = where >= len(ordered)
    strange[~strange] = ordered[where[~strange]] != written[~strange]
    if bool(np.any(strange)):
        raise PlanError(f"page group {group!r}: destination page {int(written[strange][0])} was not asked for")
    return np.minimum(np.bincount(where, minlength=len(ordered)), 2).astype(np.uint8)


def _named(plan: GroupPlan, row: int) -> str:
    component, layer = plan.cells[row]
    return f"{component!r} layer {layer}"


def _wanted(
    layout: CacheLayout,
    wanted: Mapping[str, Sequence[int]] | None,
    targets: Mapping[tuple[str, int], Region],
    held: Mapping[tuple[str, int], object],
) -> dict[str, tuple[int, ...]]:
    """Component -> layers to pull. Draft layers are optional on either side unless they are asked for by name."""
    if wanted is not None:
        return {layout.component(name).name: tuple(sorted(set(layers))) for name, layers in wanted.items()}
    chosen = {}
    for one in layout.components:
        layers = one.layers
        if one.is_draft:
            layers = tuple(layer for layer in layers if (one.name, layer) in targets and (one.name, layer) in held)
        chosen[one.name] = layers
    return chosen


def _group_plan(
    name: str,
    cells: tuple[tuple[str, int], ...],
    held: Mapping[tuple[str, int], list[tuple[int, Region]]],
    targets: Mapping[tuple[str, int], Region],
) -> GroupPlan:
    owner, columns, source_pages, destination_pages = [], [], [], []
    for row, cell in enumerate(cells):
        component, layer = cell
        if cell not in held:
            raise PlanError(f"{component!r} layer {layer} has no owner on the prefill side")
        if cell not in targets:
            raise PlanError(f"{component!r} layer {layer} has no region on the decode side")
        number, source = held[cell][row % len(held[cell])]
        target = targets[cell]
        if source.page_bytes != target.page_bytes:
            raise PlanError(
                f"{component!r} layer {layer} has page_bytes={source.page_bytes} on prefill and {target.page_bytes} on "
                "decode; use the same cache storage format on both"
            )
        owner.append(number)
        columns.append(
            (row, source.base_address, source.page_stride, target.base_address, target.page_stride, source.page_bytes)
        )
        source_pages.append(source.num_pages)
        destination_pages.append(target.num_pages)
    table = LayerTable(*(np.array(column, dtype=np.int64) for column in zip(*columns, strict=True)))
    return GroupPlan(
        name,
        cells,
        np.array(owner, dtype=np.int64),
        table,
        np.array(source_pages, dtype=np.int64),
        np.array(destination_pages, dtype=np.int64),
    )


def _check_range(side: str, pages: Int64Array, limits: Int64Array, plan: GroupPlan, rows: Int64Array, who: str) -> None:
    low, high = int(pages.min()), int(pages.max())
    if low < 0 or high >= int(limits.min()):
        component, layer = plan.cells[int(rows[int(np.argmin(limits))])]
        raise PlanError(
            f"{side} page {low if low < 0 else high} is outside the {int(limits.min())} pages of {component!r} layer "
            f"{layer} at {who}"
        )
