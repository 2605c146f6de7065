"""Owns one rank of a test world: joins it, runs the scenarios it was told to, and writes down how each went."""

from __future__ import annotations

import json
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.memory import (
    scenarios_ahead,
    scenarios_bytes,
    scenarios_cuda,
    scenarios_divergence,
    scenarios_formats,
    scenarios_graph,
    scenarios_lanes,
    scenarios_order,
    scenarios_peer,
    scenarios_random,
    scenarios_watch,
)
from tests.memory.rank_world import World

SCENARIOS = {
    **scenarios_ahead.SCENARIOS,
    **scenarios_bytes.SCENARIOS,
    **scenarios_cuda.SCENARIOS,
    **scenarios_divergence.SCENARIOS,
    **scenarios_formats.SCENARIOS,
    **scenarios_graph.SCENARIOS,
    **scenarios_lanes.SCENARIOS,
    **scenarios_order.SCENARIOS,
    **scenarios_peer.SCENARIOS,
    **scenarios_random.SCENARIOS,
    **scenarios_watch.SCENARIOS,
}


def main(orders: dict[str, object]) -> None:
    torch.set_num_threads(1)
    folder, rank = Path(str(orders["folder"])), int(str(orders["rank"]))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=int(str(orders["num_ranks"])),
        timeout=timedelta(seconds=120),
    )
    names = orders["scenarios"]
    assert isinstance(names, list)
    for name in names:
        kind, _, scenario = name.rpartition(":")
        world = World(rank, dist.get_world_size(), kind or "broadcast")
        dist.barrier()
        started, error = time.monotonic(), ""
        try:
            SCENARIOS[scenario](world)
        except Exception:  # noqa: BLE001 - whatever it is, the test prints it
            error = traceback.format_exc()
        finally:
            world.close()
        found = json.dumps({"error": error, "seconds": time.monotonic() - started})
        (folder / f"{name}.{rank}.json").write_text(found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
