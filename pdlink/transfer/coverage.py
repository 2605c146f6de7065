"""Owns which cells of one request are claimed and which have landed. It plans nothing and counts no messages.

Completion is decided here alone: a request is whole when every (row, page position) cell of every page group has landed
once, whoever said so and however often.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from pdlink.errors import PlanError
from pdlink.transfer.descriptors import Int64Array

CLAIMED, LANDED = 1, 2
"""What a cell is; 0 before."""


class Coverage:
    """Cells of one request: per page group a matrix of `num_rows` x `num_pages`. Not thread-safe.

    `claim` marks a rectangle as being pulled and refuses cells that are claimed already (a page is published once);
    `land` marks a claimed rectangle as arrived.
    """

    def __init__(self, num_rows: Mapping[str, int], num_pages: Mapping[str, int]) -> None:
        self._cells: dict[str, npt.NDArray[np.uint8]] = {
            group: np.zeros((rows, num_pages.get(group, 0)), dtype=np.uint8) for group, rows in num_rows.items()
        }
        self._num_missing = sum(one.size for one in self._cells.values())

    @property
    def is_complete(self) -> bool:
        return self._num_missing == 0

    @property
    def num_missing(self) -> int:
        """Cells that have not landed."""
        return self._num_missing

    def claim(self, group: str, rows: Int64Array, start: int, stop: int) -> None:
        """Mark `rows` at page positions [start, stop). Raises `PlanError` for a claimed or unknown cell."""
        which = self._which(group, rows, start, stop)
        block = self._cells[group][which, start:stop]
        if bool(block.any()):
            row, page = (int(one) for one in np.argwhere(self._cells[group][rows, start:stop])[0])
            raise PlanError(f"row {int(rows[row])}, page {start + page} of group {group!r} was published twice")
        self._cells[group][which, start:stop] = CLAIMED

    def land(self, group: str, rows: Int64Array, start: int, stop: int) -> None:
        """Mark claimed cells as arrived. Raises `PlanError` when a cell was not claimed or has landed before."""
        which = self._which(group, rows, start, stop)
        block = self._cells[group][which, start:stop]
        if bool((block != CLAIMED).any()):
            how = "twice" if bool((block == LANDED).any()) else "without being claimed"
            raise PlanError(f"pages [{start}, {stop}) of group {group!r} landed {how}")
        self._cells[group][which, start:stop] = LANDED
        self._num_missing -= block.size

    def first_unclaimed(self, group: str, rows: Int64Array) -> tuple[int, int] | None:
        """(row, page position) of the first cell of `rows` that nobody has published, or None."""
        block = self._cells[group][rows]
        if bool(block.all()):
            return None
        row, page = (int(one) for one in np.argwhere(block == 0)[0])
        return int(rows[row]), page

    def first_missing(self) -> tuple[str, int, int] | None:
        """(group, row, page position) of the first cell that has not landed, or None."""
        for group, cells in self._cells.items():
            missing = cells != LANDED
            if bool(missing.any()):
                row, page = (int(one) for one in np.argwhere(missing)[0])
                return group, row, page
        return None

    def _which(self, group: str, rows: Int64Array, start: int, stop: int) -> Int64Array | slice:
        """`rows` as an index, a slice where they lie together, as those of one owner mostly do. Refuses what is no
        rectangle of known cells: a row named twice would be counted twice."""
        if group not in self._cells:
            raise PlanError(f"this request has no page group {group!r}")
        num_rows, num_pages = self._cells[group].shape
        if not 0 <= start <= stop <= num_pages:
            raise PlanError(f"pages [{start}, {stop}) are outside the {num_pages} of page group {group!r}")
        known = set(rows.tolist())
        low, high = min(known, default=0), max(known, default=-1)
        if len(known) != len(rows) or low < 0 or high >= num_rows:
            raise PlanError(f"rows {rows.tolist()} are not rows of page group {group!r}, each named once")
        return slice(low, high + 1) if high - low + 1 == len(known) else rows
