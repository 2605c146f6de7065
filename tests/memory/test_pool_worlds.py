"""The sharded pool between real processes: every rank of every scenario must find what it should."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from pdlink.backends.shm import SHM_DIR, sweep_stale
from tests.memory import (
    scenarios_ahead,
    scenarios_bytes,
    scenarios_divergence,
    scenarios_formats,
    scenarios_order,
    scenarios_peer,
    scenarios_random,
    scenarios_watch,
)
from tests.memory.worlds import Outcome, run_world

BYTES = list(scenarios_bytes.SCENARIOS)
RANDOM = list(scenarios_random.SCENARIOS)
DIVERGENCE = [name for name in scenarios_divergence.SCENARIOS if name != "a_rank_that_dies"]
PEER = [name for name in scenarios_peer.SCENARIOS if name != "a_dead_rank_is_named"]
# What a rank that reads otherwise brings about depends on what has been fetched ahead by then.
ORDER_AHEAD = ["a_change_on_one_rank_alone_stops_all", "broadcasts_that_move_nothing_stop_all"]
# By how many ranks. In a hurry the first world of four ranks stands for the second.
IN_WORLD = {
    "4": [
        *BYTES,
        *DIVERGENCE,
        *scenarios_order.SCENARIOS,
        *(f"peer:{name}" for name in (*PEER, RANDOM[6])),
    ],
    "4 more": [*RANDOM[::2], *(f"peer:{name}" for name in BYTES)],
    "3": [
        *(f"{kind}+ahead:{name}" for kind in ("peer", "broadcast") for name in scenarios_ahead.SCENARIOS),
        *(f"broadcast+ahead:{name}" for name in ORDER_AHEAD),
        f"broadcast+ahead:{RANDOM[0]}",
        f"peer+ahead:{RANDOM[7]}",
        *RANDOM[1::4],
        *(f"{kind}:{name}" for kind in ("broadcast", "peer") for name in scenarios_formats.SCENARIOS),
        f"peer:{RANDOM[0]}",
        f"peer:{RANDOM[5]}",
    ],
    "2": [
        "chunk_rows_survive_a_shared_page",
        *RANDOM[3::4],
        f"peer:{RANDOM[7]}",
        *(f"{kind}:{name}" for kind in ("broadcast", "peer") for name in scenarios_watch.SCENARIOS),
    ],
}
SLOW = ("4 more",)
CASES = [
    pytest.param(world, name, marks=[pytest.mark.slow] if world in SLOW else [])
    for world, names in IN_WORLD.items()
    for name in names
]
LAUNCH_TIMEOUT_S = 240

Worlds = Callable[[str], dict[str, list[Outcome]]]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    """Starts a world when the first of its outcomes is asked for."""
    folder = tmp_path_factory.mktemp("worlds")

    @functools.cache
    def outcomes(world: str) -> dict[str, list[Outcome]]:
        return run_world(folder / world.replace(" ", "-"), int(world.split()[0]), IN_WORLD[world], LAUNCH_TIMEOUT_S)

    return outcomes


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("world", "scenario"), CASES)
def test_every_rank_of(worlds: Worlds, world: str, scenario: str) -> None:
    for outcome in worlds(world)[scenario]:
        assert not outcome.error, f"rank {outcome.rank} after {outcome.seconds:.1f} s: {outcome.error}"


@pytest.mark.parametrize("scenario", ["a_rank_that_dies", "peer:a_dead_rank_is_named"])
def test_the_others_hear_that_a_rank_died(tmp_path: Path, scenario: str) -> None:
    survivor, dead = run_world(tmp_path, 2, [scenario], LAUNCH_TIMEOUT_S)[scenario]
    assert not survivor.error, survivor.error
    assert dead.error.startswith("never finished")
    # Nobody could close what the dead rank held; whoever comes next clears it.
    sweep_stale()
    assert not list(Path(SHM_DIR).glob(f"pdlink-{dead.pid}-*"))
