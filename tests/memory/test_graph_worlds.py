"""Forwards that graphs make, but for the graphs: what is captured, what is filled for a replay, what waits for what.

The device and its graphs are those of `thread_device` and `thread_graph`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.memory import scenarios_graph
from tests.memory.test_lane_worlds import LAUNCH_TIMEOUT_S, check
from tests.memory.worlds import run_world

QUICK = [
    "peer+lanes+ahead:one_capture_serves_other_pages_and_counts",
    "peer+lanes+ahead:replays_take_turns_with_all_else",
    "peer+lanes:what_a_graph_cannot_do_is_refused",
    "broadcast+lanes:broadcasts_are_not_captured",
]
WHOLE = [f"peer+lanes{ahead}:{name}" for name in scenarios_graph.PEER for ahead in ("", "+ahead")]


@pytest.mark.timeout(600)
def test_replays_bring_right_bytes_or_raise(tmp_path: Path) -> None:
    check(run_world(tmp_path, 2, QUICK, LAUNCH_TIMEOUT_S))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_replays_bring_right_bytes_in_larger_groups(tmp_path: Path) -> None:
    check(run_world(tmp_path, 4, WHOLE, LAUNCH_TIMEOUT_S))
