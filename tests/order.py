"""Owns which test files come first: the ones that take long, so that no worker runs one alone when the others are done.

Files that are not named come after them, as pytest collects them. A name that is gone is found by tests/house.
"""

from __future__ import annotations

from pathlib import Path

import pytest

LONG = (
    "tests/link/test_backend_stops.py",
    "tests/demo/test_demo_sidecar.py",
    "tests/link/test_backend_reuse.py",
    "tests/demo/test_demo_runs.py",
    "tests/link/test_leaks.py",
    "tests/faults/test_matrix_ipc.py",
    "tests/topology/test_any_pair.py",
    "tests/sidecar/test_random_kills.py",
    "tests/faults/test_matrix_mooncake.py",
    "tests/link/test_backend_late_writes.py",
    "tests/faults/test_matrix_nixl.py",
    "tests/conformance/test_conformance.py",
    "tests/memory/test_pool_worlds.py",
    "tests/cli/test_bench_transfer.py",
    "tests/faults/test_cluster.py",
    "tests/memory/test_lane_worlds.py",
    "tests/faults/test_fuzz.py",
    "tests/demo/test_demo_damage.py",
    "tests/demo/test_demo_refusals.py",
    "tests/cli/test_progress.py",
    "tests/cli/test_bench_pool.py",
    "tests/topology/test_over_backends.py",
    "tests/cli/test_bench_sidecar.py",
    "tests/demo/test_demo_watched.py",
    "tests/link/test_world.py",
    "tests/link/test_backend_owners.py",
    "tests/faults/test_restart.py",
    "tests/faults/test_requests.py",
    "tests/cli/test_bench_control.py",
    "tests/prefill/test_sender_machine.py",
    "tests/engines/reference/test_prefill_and_decode.py",
    "tests/link/test_processes.py",
    "tests/link/test_many_peers.py",
    "tests/house/test_leftovers.py",
    "tests/memory/test_token_rows.py",
)
"""By what they take, in all suites together, the longest first."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    place = {str(config.rootpath / Path(name)): number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(str(item.path), len(place)))
