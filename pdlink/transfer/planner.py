"""Owns the pull plan of one pair of instances: which owner serves which (component, layer), and at which addresses.

It is built once per pair and reused by every request; it holds no request state (see `coverage`) and moves nothing.
A *row* is one (component, layer) that decode wants. Rows of a page group are numbered from 0; a *cell* is a row at one
page position of the request.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pdlink.errors import PlanError
from pdlink.layout.components import CacheLayout
from pdlink.layout.parts import Part
from pdlink.layout.regions import Region
from pdlink.transfer.descriptors import GroupMove, Int64Array, PullBatch, pair_pages
from pdlink.transfer.group_plan import Cutter, GroupPlan, build_group, check_range
from pdlink.transfer.kept import Kept
from pdlink.transfer.packing import split_turns
from pdlink.transfer.routes import Holder, find_routes

MAX_ROWS = 1024
"""Kept: those of each owner and page group, and of each range of layers that is published alone."""


@dataclass(frozen=True)
class Source:
    """One prefill rank as the planner sees it: its name and the regions it owns, none for a rank that owns nothing.

    `parts` is what its pages hold of each component: all of it where not named. `layout` describes its pages, where
    those of sources differ.
    """

    worker_id: str
    regions: tuple[Region, ...]
    parts: Mapping[str, Part] = field(default_factory=dict)
    layout: CacheLayout | None = None


class PullPlanner:
    """Plans pulls from `sources` into `destination` for every layer of every component that both sides name.

    `wanted` narrows the components and layers (default: those that are `owned` here, or else all that `layout` has, of
    draft components only what both sides have regions for). `layout` describes pages here and `source_layout` those of
    the sources (the same where not given); `parts` is what pages here hold of each component: all of it where not
    named. What several sources hold is given to one of them, spread evenly by bytes; `turn` (a reader's index) decides
    ties.
    Raises `PlanError` when a wanted row has no source or no destination, or its pages cannot be converted, or two
    sources share a name, and `LayoutError` for a wanted component that the layout lacks. Immutable; safe to share
    between threads.
    """

    def __init__(
        self,
        layout: CacheLayout,
        sources: Sequence[Source],
        destination: Sequence[Region],
        wanted: Mapping[str, Sequence[int]] | None = None,
        *,
        source_layout: CacheLayout | None = None,
        owned: Mapping[str, Sequence[int]] | None = None,
        parts: Mapping[str, Part] | None = None,
        turn: int = 0,
    ) -> None:
        self.layout = layout
        self.worker_ids = tuple(source.worker_id for source in sources)
        self._index = {worker_id: number for number, worker_id in enumerate(self.worker_ids)}
        if len(self._index) != len(self.worker_ids):
            raise PlanError(f"two prefill ranks share a name: {', '.join(self.worker_ids)}")
        targets = {(region.component, region.layer): region for region in destination}
        self._held = [{(region.component, region.layer): region for region in source.regions} for source in sources]
        chosen = _wanted(layout, wanted, owned, targets, {cell for held in self._held for cell in held})
        holders = [Holder(one.worker_id, _owned(one), one.parts, one.layout) for one in sources]
        routes = find_routes(source_layout or layout, holders, layout, chosen, parts, turn)
        self.groups: dict[str, GroupPlan] = {}
        for group in layout.page_groups:
            mine = [one for one in routes if one.component in group.components]
            if mine:
                cutter = Cutter(layout, parts or {})
                self.groups[group.name] = build_group(group.name, mine, self._held, targets, cutter)
        self._rows_of: dict[tuple[int, str, int], tuple[str, int]] = {
            (int(plan.owner[row]), *cell): (plan.name, row)
            for plan in self.groups.values()
            for row, cell in enumerate(plan.cells)
        }

        self._rows: Kept[tuple[int, str, tuple[tuple[str, tuple[int, ...]], ...] | None], Int64Array] = Kept(MAX_ROWS)
        self._parts_from: list[dict[str, Part]] = [{} for _ in sources]
        for plan in self.groups.values():
            for number, (name, _), part in zip(plan.owner.tolist(), plan.cells, plan.parts, strict=True):
                if part:
                    self._parts_from[number][name] = part

    @property
    def num_rows(self) -> dict[str, int]:
        """Rows per page group."""
        return {name: plan.num_rows for name, plan in self.groups.items()}

    def rows(self, worker_id: str, group: str, layers: Mapping[str, Sequence[int]] | None = None) -> Int64Array:
        """int64: rows of `group` that `worker_id` serves, only those of `layers` when given. Not to be written to.

        Layers that decode did not ask for, and rows that another replica serves, are left out. Raises `PlanError`
        when `layers` names a layer that the worker does not own.
        """
        number = self.number(worker_id)
        asked = None if layers is None else tuple((name, tuple(ids)) for name, ids in layers.items())
        return self._rows.of((number, group, asked), lambda: self._find_rows(number, group, asked))

    def pulls_all_of(self, worker_id: str) -> bool:
        """Whether every layer that a rank has is wanted of it."""
        number = self.number(worker_id)
        return all((number, *cell) in self._rows_of for cell in self._held[number])

    def parts_from(self, worker_id: str) -> Mapping[str, Part]:
        """What this side holds of components of which it takes no whole pages from a rank."""
        return self._parts_from[self.number(worker_id)]

    def pull(
        self,
        worker_id: str,
        group: str,
        rows: Int64Array,
        source_pages: Int64Array,
        destination_pages: Int64Array,
        first_page: int = 0,
    ) -> PullBatch:
        """A batch that moves page pairs (int64 [n] each) of `rows` from `worker_id`, at page positions from
        `first_page` on.

        Raises `PlanError` when a row is not served by the worker, or a page lies outside a region.
        """
        plan = self.groups.get(group)
        if plan is None:
            raise PlanError(f"nothing of page group {group!r} is wanted")
        if len(source_pages) != len(destination_pages):
            raise PlanError(f"{len(source_pages)} source pages do not pair with {len(destination_pages)} destinations")
        number = self.number(worker_id)
        if not len(rows):
            return PullBatch(worker_id, ())
        known = plan.row_set(rows)
        if known.owner != number:
            raise PlanError(f"{worker_id} does not serve all of the {len(rows)} rows asked of it")
        if not len(source_pages):
            return PullBatch(worker_id, ())
        if plan.num_turns == 1:
            runs = [pair_pages(source_pages, destination_pages)]
        else:
            turns = split_turns(first_page, len(source_pages), plan.num_turns)
            runs = [pair_pages(source_pages[mine], destination_pages[mine]) for mine in turns]
        if not all(one.lie_within(known.num_source, known.num_destination) for one in runs):
            check_range("source", source_pages, plan.source_pages[rows], plan, rows, worker_id)
            check_range("destination", destination_pages, plan.destination_pages[rows], plan, rows, "this side")
        moves = (GroupMove(group, one, table) for one, table in zip(runs, known.tables, strict=True) if one.num_runs)
        return PullBatch(worker_id, tuple(moves))

    def _find_rows(self, number: int, group: str, layers: tuple[tuple[str, tuple[int, ...]], ...] | None) -> Int64Array:
        plan = self.groups.get(group)
        if plan is None:
            return np.zeros(0, dtype=np.int64)
        if layers is None:
            return np.flatnonzero(plan.owner == number).astype(np.int64)
        rows = set()
        for cell in ((name, layer) for name, ids in layers for layer in ids):
            if cell not in self._held[number]:
                who, (name, layer) = self.worker_ids[number], cell
                raise PlanError(f"{who} published {name!r} layer {layer}, which it does not own")
            where = self._rows_of.get((number, *cell))
            if where and where[0] == group:
                rows.add(where[1])
        return np.array(sorted(rows), dtype=np.int64)

    def number(self, worker_id: str) -> int:
        """The index of a rank in `worker_ids`. Raises `PlanError` for a stranger."""
        try:
            return self._index[worker_id]
        except KeyError:
            raise PlanError(f"{worker_id} is not a rank of this prefill instance") from None


def _wanted(
    layout: CacheLayout,
    wanted: Mapping[str, Sequence[int]] | None,
    owned: Mapping[str, Sequence[int]] | None,
    targets: Mapping[tuple[str, int], Region],
    held: Collection[tuple[str, int]],
) -> dict[str, tuple[int, ...]]:
    """Component -> layers to pull. Draft layers are optional on either side unless they are asked for by name."""
    if wanted is not None:
        return {layout.component(name).name: tuple(sorted(set(layers))) for name, layers in wanted.items()}
    chosen = {}
    for one in layout.components:
        layers = one.layers if owned is None else tuple(sorted(owned.get(one.name, ())))
        if one.is_draft:  # all of it or nothing: a draft of which some layers are old is worse than none
            layers = tuple(layer for layer in layers if (one.name, layer) in targets)
            layers = layers if any((one.name, layer) in held for layer in layers) else ()
        chosen[one.name] = layers
    return {name: layers for name, layers in chosen.items() if layers}


def _owned(source: Source) -> dict[str, list[int]]:
    owned: dict[str, list[int]] = {}
    for region in source.regions:
        owned.setdefault(region.component, []).append(region.layer)
    return owned
