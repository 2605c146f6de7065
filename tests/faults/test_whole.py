"""What a fault does late is told of with it, and the next fault meets a cluster that is whole."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.faults import counts, episode, table, whole
from tests.faults.cluster import Cluster, Plan, running
from tests.faults.counts import Census
from tests.faults.hosts import loopback
from tests.faults.kinds import Fault
from tests.faults.load import Load
from tests.link.transports import TRANSPORTS

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.backend("ipc"), pytest.mark.timeout(300)]


def test_who_dies_while_a_fault_is_counted_died_of_it_and_the_next_one_meets_a_whole_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, chance, to_die = Plan(TRANSPORTS["ipc"], num_bootstraps=1), random.Random(1), ["rank0"]
    look = counts.look

    def die_then_look(cluster: Cluster) -> Census:
        while to_die:
            os.kill(cluster.processes[to_die.pop()].child.pid, signal.SIGABRT)
        return look(cluster)

    with running(plan, loopback(plan.hosts), tmp_path) as cluster:
        load = Load(cluster, chance)
        scene = episode.Scene(load, chance)
        scene.open()
        monkeypatch.setattr(counts, "look", die_then_look)
        line = scene.run(Fault("mute decode", lambda at: None), 1)
        assert [(one["name"], one["code"]) for one in line["died"]] == [("rank0", -signal.SIGABRT)]
        assert line["lacking"] == ""
        assert table.Judge(episode.layout_line()).judge(line).lost != []
        assert table.Judge(episode.layout_line()).judge(line | {"transport": "nixl-tcp"}).complaints == []
        following = scene.run(Fault("nothing", lambda at: None), 2)
        assert following["died"] == []
        assert table.Judge(episode.layout_line()).judge(following).complaints == []


def test_a_cluster_is_not_whole_while_a_bootstrap_does_not_know_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "WHOLE_DEADLINE_S", 0.0)
    plan = Plan(TRANSPORTS["ipc"])
    with running(plan, loopback(plan.hosts), tmp_path) as cluster:
        load = Load(cluster, random.Random(1))
        episode.warm_up(load)
        for rank in plan.ranks:
            cluster.stop(rank)
        cluster.kill("bootstrap1")
        assert "of {}, and the ranks are" in whole.make_whole(load)
        for rank in plan.ranks:
            cluster.resume(rank)
        monkeypatch.undo()
        assert whole.make_whole(load) == ""
