"""Owns the bar that shows how far a command has come: on standard error, where that is a terminal, and nowhere else.

It is drawn by the calls that tell of a step, which stand between what is measured, or, where nothing is measured in
this process, by a thread of rich's.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

DRAW_INTERVAL_S = 0.1


class Steps:
    """What a command tells of its way. This one shows nothing."""

    def step(self, count: float = 1) -> None:
        """So much more of the total is done."""

    def say(self, text: str) -> None:
        """What is being done now."""


class _Bar(Steps):
    def __init__(self, progress: Progress, task: TaskID, *, draws_itself: bool) -> None:
        self._progress = progress
        self._task = task
        self._draws_itself = draws_itself
        self._drawn_at = 0.0

    def step(self, count: float = 1) -> None:
        self._progress.advance(self._task, count)
        self._draw()

    def say(self, text: str) -> None:
        self._progress.update(self._task, description=text)
        self._draw()

    def _draw(self) -> None:
        now = time.monotonic()
        if not self._draws_itself and now - self._drawn_at >= DRAW_INTERVAL_S:
            self._drawn_at = now
            self._progress.refresh()


@contextmanager
def progress(text: str, total: float | None = None, *, draws_itself: bool = False) -> Iterator[Steps]:
    """A bar for `total` steps, or one that only moves (None), which goes when the block ends.

    `draws_itself` has a thread draw it ten times a second: not where this process measures anything.
    """
    if not _is_terminal():
        yield Steps()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    counted = (TextColumn("{task.completed:,.0f} of {task.total:,.0f}"), TimeRemainingColumn()) if total else ()
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), *counted)
    bar = Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True, auto_refresh=draws_itself
    )
    with bar:
        task = bar.add_task(text, total=total)
        bar.refresh()
        yield _Bar(bar, task, draws_itself=draws_itself)


def _is_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
