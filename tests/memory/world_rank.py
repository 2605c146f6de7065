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

from tests.memory import scenarios_bytes, scenarios_divergence, scenarios_random
from tests.memory.rank_world import World

SCENARIOS = {**scenarios_bytes.SCENARIOS, **scenarios_divergence.SCENARIOS, **scenarios_random.SCENARIOS}


def main(orders: dict[str, object]) -> None:
    torch.set_num_threads(1)
    folder, rank = Path(str(orders["folder"])), int(str(orders["rank"]))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=int(str(orders["num_ranks"])),
        timeout=timedelta(seconds=60),
    )
    names = orders["scenarios"]
    assert isinstance(names, list)
    for name in names:
        world = World(rank, dist.get_world_size())
        dist.barrier()
        started, error = time.monotonic(), ""
        try:
            SCENARIOS[name](world)
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
