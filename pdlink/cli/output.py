"""Owns how commands print: tables for people, one JSON object for programs. It decides nothing about what."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 200
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def console() -> Console:
    """Standard output: colours and the terminal's width on a terminal, plain and wide text elsewhere."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            """Let it be raised: rich would end the process here, in an exit code of its own."""
            raise BrokenPipeError

    return Output(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def print_table(
    out: Console, columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", left: int = 1
) -> None:
    """The first `left` columns are text, the others numbers."""
    from rich import box
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD if out.is_terminal else None)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right")
    for row in rows:
        table.add_row(*row)
    out.print(table)


def print_json(value: Mapping[str, object]) -> None:
    """One object on one line of standard output."""
    print(json.dumps(value), flush=True)


def note(text: str) -> None:
    """Progress, on standard error, so that standard output holds results only."""
    print(text, file=sys.stderr, flush=True)


def in_gib(nbytes: int) -> float:
    return nbytes / (1 << 30)


def format_sizes(sizes: Sequence[int]) -> list[str]:
    """`sizes` in bytes as text, in the unit of 1024 that suits the largest of them.

    GiB starts at 0.1, because memory plans are compared in GiB.
    """
    largest, power = max(sizes, default=0), 0
    while power + 1 < len(_UNITS) and largest >= (1024 if power != 2 else 102.4) * 1024**power:
        power += 1
    if power == 0:
        return [f"{size} B" for size in sizes]
    return [f"{size / 1024**power:.2f} {_UNITS[power]}" for size in sizes]
