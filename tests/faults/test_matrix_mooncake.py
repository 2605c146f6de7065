"""Every fault strikes one running cluster over mooncake-tcp, one after the other: nothing is wrong, lost, hung or left.

One file for each transport, so that two of them run at a time where there are two workers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.matrix import damage, half

pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.backend("mooncake-tcp"),
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize("which", ["links", pytest.param("processes", marks=pytest.mark.thorough)])
def test_every_fault_leaves_nothing_wrong_lost_hung_or_left(which: str, tmp_path: Path) -> None:
    damage("mooncake-tcp", "staged", half("mooncake-tcp", which), tmp_path)
