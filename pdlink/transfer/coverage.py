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


class Coverage:
    """Cells of one request: per page group a matrix of `num_rows` x `num_pages`. Not thread-safe.

    `claim` marks a rectangle as being pulled and refuses cells that are claimed already (a page is published once);
    `land` marks a claimed rectangle as arrived.
    """

    def __init__(self, num_rows: Mapping[str, int], num_pages: Mapping[str, int]) -> None:
        self._claimed: dict[str, npt.NDArray[np.bool_]] = {}
        self._landed: dict[str, npt.NDArray[np.bool_]] = {}
        for group, rows in num_rows.items():
            shape = (rows, num_pages.get(group, 0))
            self._claimed[group] = np.zeros(shape, dtype=np.bool_)
            self._landed[group] = np.zeros(shape, dtype=np.bool_)
        self._num_missing = sum(one.size for one in self._landed.values())

    @property
    def is_complete(self) -> bool:
        return self._num_missing == 0

    @property
    def num_missing(self) -> int:
        """Cells that have not landed."""
        return self._num_missing

    def claim(self, group: str, rows: Int64Array, start: int, stop: int) -> None:
        """Mark `rows` at page positions [start, stop). Raises `PlanError` for a claimed or unknown cell."""
        self._check(group, rows, start, stop)
        matrix = self._claimed[group]
        block = matrix[rows, start:stop]
        if bool(block.any()):
            row, page = (int(one) for one in np.argwhere(block)[0])
            raise PlanError(f"row {int(rows[row])}, page {start + page} of group {group!r} was published twice")
        matrix[rows, start:stop] = True

    def land(self, group: str, rows: Int64Array, start: int, stop: int) -> None:
        """Mark claimed cells as arrived. Raises `PlanError` when a cell was not claimed or has landed before."""
        self._check(group, rows, start, stop)
        if not bool(self._claimed[group][rows, start:stop].all()):
            raise PlanError(f"pages [{start}, {stop}) of group {group!r} landed without being claimed")
        block = self._landed[group][rows, start:stop]
        if bool(block.any()):
            raise PlanError(f"pages [{start}, {stop}) of group {group!r} landed twice")
        self._landed[group][rows, start:stop] = True
        self._num_missing -= block.size

    def first_unclaimed(self, group: str, rows: Int64Array) -> tuple[int, int] | None:
        """(row, page position) of the first cell of `rows` that nobody has published, or None."""
        block = self._claimed[group][rows]
        if bool(block.all()):
            return None
        row, page = (int(one) for one in np.argwhere(~block)[0])
        return int(rows[row]), page

    def first_missing(self) -> tuple[str, int, int] | None:
        """(group, row, page position) of the first cell that has not landed, or None."""
        for group, matrix in self._landed.items():
            if not bool(matrix.all()):
                row, page = (int(one) for one in np.argwhere(~matrix)[0])
                return group, row, page
        return None

    def _check(self, group: str, rows: Int64Array, start: int, stop: int) -> None:
        """Refuse what is no rectangle of known cells. A row named twice would be counted twice."""
        if group not in self._landed:
            raise PlanError(f"this request has no page group {group!r}")
        num_rows, num_pages = self._landed[group].shape
        if not 0 <= start <= stop <= num_pages:
            raise PlanError(f"pages [{start}, {stop}) are outside the {num_pages} of page group {group!r}")
        if not len(rows):
            return
        times = np.bincount(rows, minlength=num_rows) if int(rows.min()) >= 0 else np.zeros(0, dtype=np.int64)
        if len(times) != num_rows or int(times.max()) > 1:
            raise PlanError(f"rows {rows.tolist()} are not rows of page group {group!r}, each named once")
