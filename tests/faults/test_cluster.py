"""Clusters of real processes, damaged a few times while requests run: nothing is wrong, lost, hung or left.

The short form of `test_matrix_ipc`, `test_matrix_nixl` and `test_matrix_mooncake`; in a hurry over ipc alone. See the
README here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.kinds import fault
from tests.faults.matrix import damage

pytestmark = pytest.mark.faults

SHORT = [
    ("ipc", "staged", ("kill prefill", "exit decode", "empty all bootstraps", "reorder frames to decode")),
    ("nixl-tcp", "direct", ("kill prefill", "stop prefill for a moment", "kill one bootstrap")),
    ("mooncake-tcp", "direct", ("stop for good prefill", "cut decode", "mute prefill", "stop all bootstraps")),
]


def marks(transport: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.backend(transport), *([] if transport == "ipc" else [pytest.mark.slow])]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("transport", "way", "faults"),
    [pytest.param(*one, id=f"{one[0]}-{one[1]}", marks=marks(one[0])) for one in SHORT],
)
def test_a_few_faults_leave_nothing_wrong_lost_hung_or_left(
    transport: str, way: str, faults: tuple[str, ...], tmp_path: Path
) -> None:
    damage(transport, way, [fault(one) for one in faults], tmp_path)
