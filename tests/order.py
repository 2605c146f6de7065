"""Owns which test files come first: the ones that take long, so that no worker runs one alone when the others are done.

Files that are not named come after them, as pytest collects them. A name that is gone is found by tests/house.
"""

from __future__ import annotations

from pathlib import Path

import pytest

LONG = (
    "tests/demo/test_demo_runs.py",
    "tests/link/test_backend_stops.py",
    "tests/link/test_backend_reuse.py",
    "tests/conformance/test_conformance.py",
    "tests/memory/test_pool_worlds.py",
    "tests/faults/test_cluster.py",
    "tests/demo/test_demo_damage.py",
    "tests/demo/test_demo_refusals.py",
    "tests/link/test_backend_late_writes.py",
    "tests/link/test_backend_owners.py",
    "tests/faults/test_restart.py",
    "tests/faults/test_requests.py",
    "tests/cli/test_bench_transfer.py",
    "tests/cli/test_bench_control.py",
    "tests/prefill/test_sender_machine.py",
    "tests/engines/reference/test_prefill_and_decode.py",
    "tests/link/test_processes.py",
    "tests/link/test_many_peers.py",
    "tests/house/test_leftovers.py",
    "tests/faults/test_fuzz.py",
    "tests/memory/test_token_rows.py",
    "tests/link/test_leaks.py",
)
"""By what they take, in all suites together, the longest first."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    place = {str(config.rootpath / Path(name)): number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(str(item.path), len(place)))
