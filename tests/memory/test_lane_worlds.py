"""The pool on devices, but for the devices: everything that decides what is launched, when, and what waits for what.

Memory is shared memory of the host and the lane of fetches a thread; see `thread_device`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.memory import scenarios_ahead, scenarios_bytes, scenarios_formats, scenarios_lanes, scenarios_random
from tests.memory.worlds import Outcome, run_world

RANDOM = list(scenarios_random.SCENARIOS)
FORMATS = list(scenarios_formats.SCENARIOS)
QUICK = [
    *(f"broadcast+lanes+ahead:{name}" for name in scenarios_lanes.BROADCAST),
    *(f"peer+lanes+ahead:{name}" for name in scenarios_lanes.PEER),
    *(f"{kind}+lanes+ahead:chunk_rows_come_after_a_late_gather" for kind in ("peer", "broadcast")),
    "peer+lanes:memory_is_what_the_plan_says",
    f"peer+lanes+ahead:{RANDOM[-1]}",
    f"broadcast+lanes+ahead:{RANDOM[-2]}",
    "peer+lanes:a_rank_without_work_holds_nobody_up",
    "peer+lanes:bytes_moved_do_not_depend_on_pool_size",
]
# What a failure brings about at once on the host comes at the end of the forward here; `scenarios_lanes` has those.
AHEAD = [name for name in scenarios_ahead.SCENARIOS if "fail" not in name]
WHOLE = {
    4: [
        *(f"{kind}+lanes:{name}" for kind in ("peer", "broadcast") for name in (*scenarios_bytes.SCENARIOS, *FORMATS)),
        *(f"{kind}+lanes:{name}" for kind in ("peer", "broadcast") for name in RANDOM[::3]),
        "peer+lanes:ranks_read_what_they_like",
        "peer+lanes:an_empty_batch_on_one_rank_is_fine",
        "peer+lanes:writers_wait_for_slow_gathers",
        "peer+lanes:gathers_wait_for_slow_writers",
        "peer+lanes:ranks_with_other_batches_are_named",
        "peer+lanes:pools_of_other_sizes_are_named",
        "peer+lanes:a_change_on_one_rank_alone_is_found",
        "broadcast+lanes:another_batch_on_one_rank",
        "broadcast+lanes:another_pool_size_on_one_rank",
        *(f"broadcast+lanes:{name}" for name in scenarios_lanes.BROADCAST),
    ],
    2: [
        *(f"{kind}+lanes+ahead:{name}" for kind in ("peer", "broadcast") for name in AHEAD),
        *(f"{kind}+lanes+ahead:{name}" for kind in ("peer", "broadcast") for name in RANDOM[1::3]),
    ],
}
LAUNCH_TIMEOUT_S = 240


def check(outcomes: dict[str, list[Outcome]]) -> None:
    bad = [
        f"{name}, rank {one.rank} after {one.seconds:.1f} s: {one.error}"
        for name, ranks in outcomes.items()
        for one in ranks
        if one.error
    ]
    assert not bad, "\n".join(bad)


@pytest.mark.timeout(1500)
def test_lanes_bring_right_bytes_or_raise(tmp_path: Path) -> None:
    check(run_world(tmp_path, 3, QUICK, LAUNCH_TIMEOUT_S))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("size", list(WHOLE))
def test_lanes_do_all_that_the_host_does(tmp_path: Path, size: int) -> None:
    check(run_world(tmp_path, size, WHOLE[size], LAUNCH_TIMEOUT_S))
