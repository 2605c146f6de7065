"""Owns worlds of real gloo processes for the pool's tests: starts one process a rank and collects what each found.

A rank is `python -m tests.memory.world_rank` with its orders as JSON; many scenarios share a launch, because starting
a process costs more than most of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests import processes

REPO = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """What one rank says of one scenario: an empty `error` means that every check held."""

    rank: int
    pid: int
    error: str
    seconds: float


def run_world(
    folder: Path, num_ranks: int, scenarios: list[str], timeout_s: float, warnings: str = "error"
) -> dict[str, list[Outcome]]:
    """Run `scenarios` in order on `num_ranks` processes; scenario -> outcome of each rank.

    `timeout_s` is how long nothing may come to an end, neither a scenario nor a process.
    """
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(num_ranks):
            orders = {"rank": rank, "num_ranks": num_ranks, "folder": str(folder), "scenarios": scenarios}
            command = [sys.executable, "-W", warnings, "-m", "tests.memory.world_rank", json.dumps(orders)]
            log = stack.enter_context((folder / f"log{rank}").open("wb"))
            ranks.append(stack.enter_context(processes.started(command, cwd=REPO, env=environ, stdout=log, stderr=log)))
        # What did not finish in time has no outcome, which fails its tests.
        ended, changed_at = (0, 0), time.monotonic()
        while ended[0] < num_ranks and time.monotonic() < changed_at + timeout_s:
            time.sleep(0.05)
            now = sum(one.poll() is not None for one in ranks), sum(1 for _ in folder.glob("*.json"))
            if now != ended:
                ended, changed_at = now, time.monotonic()
    return {name: [_outcome(folder, rank, one.pid, name) for rank, one in enumerate(ranks)] for name in scenarios}


def _outcome(folder: Path, rank: int, pid: int, name: str) -> Outcome:
    path = folder / f"{name}.{rank}.json"
    if not path.exists():
        return Outcome(rank, pid, f"never finished; its log: {(folder / f'log{rank}').read_text()[-2000:]}", 0.0)
    return Outcome(rank, pid, **json.loads(path.read_text()))
