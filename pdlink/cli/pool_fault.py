"""Owns `pdlink bench loop --kill-rank`: one rank is killed in a forward, and how soon each of the others knows it.

Every reader has ranks of its own, since a shard group does not outlive one of them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdlink.cli.exits import WrongRun
from pdlink.cli.pool_case import PoolCase
from pdlink.errors import DeadlineExceeded, InvalidInput
from pdlink.testing.child import Child, ChildEnded

RANK = "pdlink.cli.pool_fault_rank"
RAISED, WENT_ON, ENDED, SILENT = "raised", "went on", "ended", "silent"
MUST_RAISE = ("broadcast", "peer")
"""Readers of pdlink: with them each rank raises, in bounded time, and names the rank that has gone."""
PATIENCE_S = 30.0
"""On top of what the readers' own waits may take."""
COLUMNS = ("reader", "ranks", "killed", "the others", "named it", "s (slowest)", "forwards after", "closed s")


@dataclass(frozen=True, slots=True)
class Fate:
    """What one of the other ranks came to, and after how many seconds; `error` is in its own words.

    `forwards` are those that it finished after the death, the one that was under way among them. `closed_s` is how long
    its pools then took to close; None: they did not.
    """

    rank: int
    outcome: str
    took_s: float
    error: str = ""
    forwards: int = 0
    closed_s: float | None = None

    def names(self, rank: int) -> bool:
        return bool(re.search(rf"global rank {rank}\b", self.error))


def measure(case: PoolCase, killed: int) -> list[dict[str, object]]:
    """A row for each reader of `case`. Raises `InvalidInput` for a rank that there is not."""
    from pdlink.cli.output import note

    if not 0 <= killed < case.ranks:
        raise InvalidInput(f"--kill-rank {killed}: there are ranks 0 to {case.ranks - 1}")
    rows = []
    for reader in case.readers:
        note(f"{reader}: rank {killed} of {case.ranks} is killed in layer {case.layers // 2} of {case.layers}")
        rows.append(make_row(replace(case, readers=(reader,)), killed, _run(replace(case, readers=(reader,)), killed)))
    return rows


def make_row(case: PoolCase, killed: int, fates: Sequence[Fate]) -> dict[str, object]:
    return {
        "reader": case.readers[0],
        "ranks": case.ranks,
        "killed_rank": killed,
        "layers": case.layers,
        "device": case.device,
        "ahead": case.ahead,
        "timeout_s": case.readers_wait_s,
        "slowest_s": max(fate.took_s for fate in fates),
        "others": [
            {
                "rank": fate.rank,
                "outcome": fate.outcome,
                "s": fate.took_s,
                "names_rank": fate.names(killed),
                "forwards": fate.forwards,
                "closed_s": fate.closed_s,
                "error": fate.error,
            }
            for fate in fates
        ],
    }


def as_text(row: dict[str, Any]) -> list[str]:
    """The cells of `COLUMNS`."""
    others = row["others"]
    outcomes = [fate["outcome"] for fate in others]
    forwards = sorted({fate["forwards"] for fate in others})
    closed = [fate["closed_s"] for fate in others if fate["closed_s"] is not None]
    return [
        row["reader"],
        str(row["ranks"]),
        str(row["killed_rank"]),
        ", ".join(f"{outcomes.count(one)} {one}" for one in dict.fromkeys(outcomes)),
        f"{sum(fate['names_rank'] for fate in others)} of {len(others)}",
        f"{row['slowest_s']:.2f}",
        "-".join(str(one) for one in dict.fromkeys((forwards[0], forwards[-1]))),
        f"{max(closed):.2f}" if len(closed) == len(others) else "never",
    ]


def check(rows: Sequence[dict[str, Any]]) -> None:
    """Raises `WrongRun` where a reader of pdlink left a rank without an error that names the one that was killed."""
    for row in rows:
        if row["reader"] not in MUST_RAISE:
            continue
        for fate in row["others"]:
            is_closed = fate["closed_s"] is not None
            if fate["outcome"] != RAISED or not fate["names_rank"] or not is_closed:
                raise WrongRun(
                    f"{row['reader']}: rank {fate['rank']} {fate['outcome']} after {fate['s']:.1f} s and "
                    f"{'closed' if is_closed else 'did not close'} its pools; it was to raise an error that names rank "
                    f"{row['killed_rank']}, and close: {fate['error'] or 'it said nothing'}"
                )


def _run(case: PoolCase, killed: int) -> list[Fate]:
    """Start the ranks of one reader; what those come to that are not killed."""
    import tempfile
    from contextlib import ExitStack

    environ = {"OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
    with tempfile.TemporaryDirectory(prefix="pdlink-bench-") as folder, ExitStack() as stack:
        arguments = [folder, case.to_json(), str(killed)]
        ranks = [
            stack.enter_context(Child(f"rank {rank}", RANK, [str(rank), *arguments], environ))
            for rank in range(case.ranks)
        ]
        for rank in ranks:
            rank.hear(4 * case.wait_s)
        _, died = ranks[killed].hear(case.wait_s)
        give_up = time.monotonic() + 4 * case.readers_wait_s + PATIENCE_S
        fates = [_fate(at, rank, died, give_up) for at, rank in enumerate(ranks) if at != killed]
        for fate in fates:
            if fate.closed_s is None:
                ranks[fate.rank].kill()
    return fates


def _fate(at: int, rank: Child, died: float, give_up: float) -> Fate:
    """What one rank tells of itself until `give_up`, or fails to."""
    fate = Fate(at, SILENT, 0.0)
    try:
        outcome, when, error, forwards = rank.hear(max(0.0, give_up - time.monotonic()))
        fate = Fate(at, outcome, when - died, error, forwards)
        _, closed_s, error = rank.hear(max(0.0, give_up - time.monotonic()))
        return replace(fate, closed_s=closed_s, error="; ".join(one for one in (fate.error, error) if one))
    except DeadlineExceeded:
        return fate if fate.outcome != SILENT else replace(fate, took_s=time.monotonic() - died)
    except ChildEnded as error:
        if fate.outcome != SILENT:
            return replace(fate, error=f"{fate.error}; {error}")
        return Fate(at, ENDED, time.monotonic() - died, str(error))
