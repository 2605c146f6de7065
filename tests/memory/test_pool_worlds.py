"""The sharded pool between real processes: every rank of every scenario must find what it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdlink.backends.shm import SHM_DIR, sweep_stale
from tests.memory import scenarios_bytes, scenarios_divergence, scenarios_random
from tests.memory.worlds import Outcome, run_world

BYTES = list(scenarios_bytes.SCENARIOS)
RANDOM = list(scenarios_random.SCENARIOS)
DIVERGENCE = [name for name in scenarios_divergence.SCENARIOS if name != "a_rank_that_dies"]
IN_WORLD = {
    4: [*BYTES, *DIVERGENCE, *RANDOM[::2]],
    3: RANDOM[1::4],
    2: ["chunk_rows_survive_a_shared_page", *RANDOM[3::4]],
}
LAUNCH_TIMEOUT_S = 150

Worlds = dict[int, dict[str, list[Outcome]]]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    folder = tmp_path_factory.mktemp("worlds")
    return {size: run_world(folder / str(size), size, names, LAUNCH_TIMEOUT_S) for size, names in IN_WORLD.items()}


@pytest.mark.timeout(LAUNCH_TIMEOUT_S + 30)
@pytest.mark.parametrize(("size", "scenario"), [(size, name) for size, names in IN_WORLD.items() for name in names])
def test_every_rank_of(worlds: Worlds, size: int, scenario: str) -> None:
    for outcome in worlds[size][scenario]:
        assert not outcome.error, f"rank {outcome.rank} after {outcome.seconds:.1f} s: {outcome.error}"


def test_the_others_hear_that_a_rank_died(tmp_path: Path) -> None:
    survivor, dead = run_world(tmp_path, 2, ["a_rank_that_dies"], 50)["a_rank_that_dies"]
    assert not survivor.error, survivor.error
    assert dead.error.startswith("never finished")
    # Nobody could close what the dead rank held; whoever comes next clears it.
    sweep_stale()
    assert not list(Path(SHM_DIR).glob(f"pdlink-{dead.pid}-*"))
