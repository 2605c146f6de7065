"""Owns one rank of `pdlink bench loop --kill-rank`, as a process of its own: forwards, the death of one rank in the
middle of its layers, and what the others then find. It sums nothing up.

Started with its rank, a folder to meet in, the case (one reader), and the rank that is killed. All times are those of
the host's monotonic clock, which its processes share.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from pdlink.cli.pool_case import PoolCase
from pdlink.cli.pool_rank import Bench, join, meet
from pdlink.errors import PdlinkError
from pdlink.testing.parent import Parent

WARM_UP = 1
FORWARDS_AFTER = 3
"""As many as a rank goes on without the one that was killed; it need not go further to show that it can."""


def run_forward(bench: Bench, reader: str, parent: Parent, *, dies: bool = False) -> None:
    """All layers as the loop reads and computes them; nothing here but the reader needs the other ranks."""
    pool = bench.pools.get(reader)
    if pool is not None:
        pool.begin_forward([bench.span], bench.order)
    for layer in range(bench.case.layers):
        for component in ("index_k", "latent"):
            bench.read(reader, component, layer)
        bench.compute(pool, layer)
        if dies and layer == bench.case.layers // 2:
            wait_for_device(bench)
            parent.say(["dies", time.monotonic()])
            os.kill(os.getpid(), signal.SIGKILL)
    if pool is not None:
        pool.end_forward()
    wait_for_device(bench)


def wait_for_device(bench: Bench) -> None:
    """Until the current stream has come here; of a host nothing."""
    if bench.pool_device is not None:
        torch.cuda.current_stream().synchronize()


def outlive(bench: Bench, reader: str, parent: Parent) -> None:
    """Forwards until one raises, or until there have been enough; then the end of the pool."""
    done = 0
    try:
        while done <= FORWARDS_AFTER:
            run_forward(bench, reader, parent)
            done += 1
        parent.say(["went on", time.monotonic(), "", done])
    except (PdlinkError, RuntimeError) as error:
        # RuntimeError: what torch raises of a baseline.
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        parent.say(["raised", time.monotonic(), text, done])
    began = time.monotonic()
    try:
        bench.close()
        parent.say(["closed", time.monotonic() - began, ""])
    except PdlinkError as error:
        parent.say(["closed", time.monotonic() - began, f"{type(error).__name__}: {error}"])


def main() -> None:
    parent = Parent()
    rank, folder, case, killed = int(sys.argv[1]), sys.argv[2], PoolCase.from_json(sys.argv[3]), int(sys.argv[4])
    (reader,) = case.readers
    join(case, rank, folder)
    bench = Bench(case, rank)
    for _ in range(WARM_UP):
        run_forward(bench, reader, parent)
    meet()
    parent.say("ready")
    if rank == killed:
        run_forward(bench, reader, parent, dies=True)
    outlive(bench, reader, parent)
    # What is left of a group that one rank has gone from would be waited for.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
