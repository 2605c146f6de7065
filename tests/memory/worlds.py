"""Owns worlds of real gloo processes for the pool's tests: starts one process a rank and collects what each found.

A rank is `python -m tests.memory.world_rank` with its orders as JSON; many scenarios share a launch, because starting
a process costs more than most of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """What one rank says of one scenario: an empty `error` means that every check held."""

    rank: int
    pid: int
    error: str
    seconds: float


def run_world(folder: Path, num_ranks: int, scenarios: list[str], timeout_s: float) -> dict[str, list[Outcome]]:
    """Run `scenarios` in order on `num_ranks` processes; scenario -> outcome of each rank."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    folder.mkdir(parents=True, exist_ok=True)
    processes = []
    for rank in range(num_ranks):
        orders = {"rank": rank, "num_ranks": num_ranks, "folder": str(folder), "scenarios": scenarios}
        command = [sys.executable, "-W", "error", "-m", "tests.memory.world_rank", json.dumps(orders)]
        with (folder / f"log{rank}").open("wb") as log:
            processes.append(subprocess.Popen(command, cwd=REPO, env=environ, stdout=log, stderr=log))
    until = time.monotonic() + timeout_s
    try:
        # What did not finish in time has no outcome, which fails its tests.
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in processes:
                process.wait(max(0.0, until - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return {
        name: [_outcome(folder, rank, process.pid, name) for rank, process in enumerate(processes)]
        for name in scenarios
    }


def _outcome(folder: Path, rank: int, pid: int, name: str) -> Outcome:
    path = folder / f"{name}.{rank}.json"
    if not path.exists():
        return Outcome(rank, pid, f"never finished; its log: {(folder / f'log{rank}').read_text()[-2000:]}", 0.0)
    return Outcome(rank, pid, **json.loads(path.read_text()))
