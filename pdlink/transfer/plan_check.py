"""Owns the check of a plan before a byte moves: every destination byte asked for has one source, which owns it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pdlink.errors import PlanError
from pdlink.transfer.descriptors import GroupMove, Int64Array, PullBatch
from pdlink.transfer.group_plan import GroupPlan, check_range
from pdlink.transfer.packing import split_turns
from pdlink.transfer.planner import PullPlanner

COLUMNS = ("source_base", "source_stride", "destination_base", "destination_stride", "page_bytes")


def check_batches(
    planner: PullPlanner,
    batches: Sequence[PullBatch],
    destination_pages: Mapping[str, Int64Array],
    first_page: Mapping[str, int] | None = None,
) -> None:
    """Raise `PlanError` unless `batches` write every asked cell exactly once, from a rank that owns it.

    `destination_pages` are the pages asked for per group, int64, one for each page position from `first_page` on;
    without repeats but for the turns of one page. The error names the first cell without a source or with several, or
    the first row whose source, addresses or pages are not those of its regions.
    """
    for batch in batches:
        for move in batch.moves:
            if move.group not in planner.groups:
                raise PlanError(f"{batch.worker_id} is asked for page group {move.group!r}, of which nothing is wanted")
    for name, plan in planner.groups.items():
        found = [
            (move, *_check_rows(planner, plan, batch.worker_id, move))
            for batch in batches
            for move in batch.moves
            if move.group == name and len(move.layers.rows)
        ]
        pages = destination_pages.get(name, np.zeros(0, dtype=np.int64))
        turns = split_turns((first_page or {}).get(name, 0), len(pages), plan.num_turns)
        for turn, mine in enumerate(turns):
            _check_turn(plan, [(move, rows) for move, rows, its in found if its == turn], np.sort(pages[mine]))


def _check_turn(plan: GroupPlan, moves: Sequence[tuple[GroupMove, Int64Array]], ordered: Int64Array) -> None:
    if bool(np.any(np.diff(ordered) == 0)):
        raise PlanError(f"page group {plan.name!r} asks for a destination page twice")
    # A move of every asked page counts by row. Only other moves are counted by cell: a matrix of rows x pages.
    whole = np.zeros(plan.num_rows, dtype=np.int64)
    partial: list[tuple[Int64Array, npt.NDArray[np.uint8]]] = []
    for move, rows in moves:
        written = np.sort(move.runs.destination_pages())
        if np.array_equal(written, ordered):
            whole[rows] += 1
        else:
            partial.append((rows, _page_counts(written, ordered, plan.name)))
    if not partial and bool(np.all(whole == 1)):
        return
    # Counts stop at 2, so that no number of repeats can wrap around to 1.
    times = np.repeat(np.minimum(whole, 2).astype(np.uint8)[:, None], len(ordered), axis=1)
    for rows, counts in partial:
        times[rows] = np.minimum(times[rows] + counts, 2)
    if bool(np.any(times != 1)):
        row, column = (int(one) for one in np.argwhere(times != 1)[0])
        how = "no source" if times[row, column] == 0 else "more than one source"
        raise PlanError(f"{plan.named(row)}, destination page {int(ordered[column])} has {how}")


def _check_rows(planner: PullPlanner, plan: GroupPlan, worker_id: str, move: GroupMove) -> tuple[Int64Array, int]:
    """The rows of a move, and its turn: every row is served by the worker, with all of its runs, once, at the addresses
    and within the pages of its regions."""
    runs = move.layers.rows
    if int(runs.min()) < 0 or int(runs.max()) >= plan.num_rows:
        raise PlanError(f"rows {int(runs.min())}..{int(runs.max())} are outside the {plan.num_rows} of {plan.name!r}")
    times, right = np.bincount(runs, minlength=plan.num_rows), plan.num_runs
    if bool(np.any(times > right)):
        raise PlanError(f"{plan.named(int((times > right).argmax()))} is planned twice in one batch of {worker_id}")
    if bool(np.any((times > 0) & (times < right))):
        row = int(((times > 0) & (times < right)).argmax())
        raise PlanError(f"{plan.named(row)} is planned in part in one batch of {worker_id}")
    rows, first = np.unique(runs, return_index=True)
    rows = rows[np.argsort(first)]
    mine = plan.owner[rows] == planner.number(worker_id)
    if not bool(np.all(mine)):
        row = int(rows[int(np.argmin(mine))])
        serves = planner.worker_ids[int(plan.owner[row])]
        raise PlanError(f"{plan.named(row)} is asked of {worker_id}, but {serves} serves it")
    turn = _turn_of(plan, rows, move)
    if move.runs.num_runs:
        check_range("source", move.runs.source, plan.source_pages[rows], plan, rows, worker_id)
        last = move.runs.source + move.runs.count - 1
        check_range("source", last, plan.source_pages[rows], plan, rows, worker_id)
        last = move.runs.destination + move.runs.count - 1
        check_range("destination", last, plan.destination_pages[rows], plan, rows, "this side")
    return rows, turn


def _turn_of(plan: GroupPlan, rows: Int64Array, move: GroupMove) -> int:
    tables = plan.row_set(rows).tables
    for turn, table in enumerate(tables):
        if all(np.array_equal(getattr(move.layers, name), getattr(table, name)) for name in ("rows", *COLUMNS)):
            return turn
    for name in COLUMNS:
        found, right = getattr(move.layers, name), getattr(tables[0], name)
        if not np.array_equal(found, right):
            at = int(np.argmin(found == right))
            raise PlanError(
                f"{plan.named(int(move.layers.rows[at]))} is planned with {name}={int(found[at]):#x}, its region has "
                f"{int(right[at]):#x}"
            )
    raise PlanError(f"page group {plan.name!r} is planned with the runs of its rows out of order")


def _page_counts(written: Int64Array, ordered: Int64Array, group: str) -> npt.NDArray[np.uint8]:
    """uint8 [len(ordered)]: how often `written` (increasing) has each asked page, 2 standing for more."""
    where = np.searchsorted(ordered, written)
    strange = where >= len(ordered)
    strange[~strange] = ordered[where[~strange]] != written[~strange]
    if bool(np.any(strange)):
        raise PlanError(f"page group {group!r}: destination page {int(written[strange][0])} was not asked for")
    return np.minimum(np.bincount(where, minlength=len(ordered)), 2).astype(np.uint8)
