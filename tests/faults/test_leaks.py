"""Real processes that keep one more thing for each fault are found out at each, and a process that does not, never."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import episode, table
from tests.faults.cluster import Plan, running
from tests.faults.hosts import loopback
from tests.faults.kinds import At, Fault
from tests.faults.leaks import KINDS
from tests.faults.load import Load
from tests.link.transports import TRANSPORTS

SAID = {"file": "fds", "thread": "threads leaked", "segment": "segments", "region": "regions"}
FIRST_PROBES_ONLY_S = 0.0
"""What is planted here does not go away, so that nobody needs to wait for that."""

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.backend("ipc"), pytest.mark.timeout(300)]


def leak(name: str, kind: str) -> Callable[[At], None]:
    def inject(at: At) -> None:
        at.victims = [name]
        at.cluster.ask(name, do="leak", what=kind)

    return inject


def test_one_thing_kept_for_each_fault_is_found_each_time_on_either_side(tmp_path: Path) -> None:
    plan = Plan(TRANSPORTS["ipc"], num_ranks=1, num_bootstraps=1)
    chance, judge = random.Random(1), table.Judge(episode.layout_line())
    planted = [("reader0", "file"), ("reader0", "file"), *zip(["rank0", "reader0"] * 2, KINDS, strict=True)]
    harmless = Fault("nothing", lambda at: None)
    with running(plan, loopback(plan.hosts), tmp_path) as cluster:
        scene = episode.Scene(Load(cluster, chance), chance)
        scene.open()
        for one in (harmless, Fault("for a moment", leak("rank0", "file for a moment"))):
            assert judge.judge(scene.run(one, 0)).complaints == []
        scene.leak_deadline_s = FIRST_PROBES_ONLY_S
        for number, (name, kind) in enumerate(planted, 1):
            found = judge.judge(scene.run(Fault(f"keep a {kind}", leak(name, kind)), number))
            assert found.leaks, f"{kind} kept by {name}"
            assert all(text.startswith(f"{name}: ") for text in found.leaks), found.leaks
            assert any(SAID[kind] in text for text in found.leaks), found.leaks
            assert found.complaints == [f"leaks: {text}" for text in found.leaks]
        assert judge.judge(scene.run(harmless, 0)).complaints == []
