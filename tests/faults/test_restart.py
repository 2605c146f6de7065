"""Prefill, decode and bootstrap die and come back at the same address: peers find each other without being told."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import episode
from tests.faults.cluster import Cluster, Plan, running, said
from tests.faults.hosts import loopback, namespaces, namespaces_missing
from tests.faults.kinds import cut_off
from tests.faults.load import Load, Request
from tests.faults.shape import RECOVERY_DEADLINE_S, SETTINGS
from tests.faults.table import wanted_hashes
from tests.link.transports import TRANSPORTS

DAY_BACK = {"FAULTS_CLOCK_AHEAD_S": "-86400"}
IPC = TRANSPORTS["ipc"]

pytestmark = [pytest.mark.faults, pytest.mark.backend("ipc"), pytest.mark.timeout(240)]


@contextlib.contextmanager
def loaded(logs: Path, *, apart: bool = False) -> Iterator[tuple[Cluster, Load]]:
    """A cluster whose every process has done something, and what begins requests on it."""
    plan = Plan(IPC)
    with contextlib.ExitStack() as stack:
        hosts = namespaces(stack, plan.hosts) if apart else loopback(plan.hosts)
        cluster = stack.enter_context(running(plan, hosts, logs))
        load = Load(cluster, random.Random(1))
        episode.warm_up(load)
        yield cluster, load


def succeed(load: Load, logs: Path, num_pages: int = 3) -> Request:
    """One request, right to the last byte."""
    one = load.begin("reader0", num_pages)
    load.drain()
    assert one.state == "done", f"{one.said.get('why')}\n{said(logs)}"
    assert one.said["hashes"] == wanted_hashes(one.name, num_pages, episode.layout_line())
    return one


def succeed_in_time(load: Load, logs: Path) -> Request:
    """The first request that succeeds, of as many as it takes."""
    load.concurrency = 1
    found: list[Request] = []

    def done() -> bool:
        load.step()
        if not load.under_way:
            load.settle()  # so that readers do not run out of pages
        found[:] = [one for one in load.requests.values() if one.state == "done" and one.begun > since]
        return bool(found)

    since = max(one.begun for one in load.requests.values()) if load.requests else 0.0
    load.cluster.wait_for(done, RECOVERY_DEADLINE_S, f"no request has succeeded; {said(logs)}")
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["0 1", "1 0"])
def test_a_reader_that_knew_nobody_finds_the_ranks_whichever_bootstrap_is_left_or_came_back_empty(
    order: str, tmp_path: Path
) -> None:
    """Everybody registers with both, and registers again by itself with the one that lost everything."""
    first, second = (f"bootstrap{number}" for number in order.split())
    with loaded(tmp_path) as (cluster, load):
        for dies, stays in ((first, second), (second, first)):
            cluster.kill(dies)
            cluster.kill("reader0")
            cluster.processes["reader0"].child.close()
            cluster.launch("reader0")
            cluster.wait_ready("reader0")
            succeed(load, tmp_path)
            assert cluster.revive() == [dies]
            cluster.wait_a_moment(float(str(SETTINGS["registration_lease_s"])))  # by now every rank has renewed there
            assert cluster.processes[stays].ready


@pytest.mark.slow
def test_a_request_that_had_resolved_succeeds_while_no_bootstrap_lives(tmp_path: Path) -> None:
    with loaded(tmp_path) as (cluster, load):
        one = load.begin("reader0", 12, gap_s=0.3)
        cluster.wait_a_moment(0.2)
        for name in cluster.plan.bootstraps:
            cluster.kill(name)
        load.drain()
        assert one.state == "done", one.said.get("why")
        cluster.revive()
        succeed_in_time(load, tmp_path)


def test_a_rank_that_comes_back_while_its_clock_is_a_day_behind_is_taken_for_what_it_is(tmp_path: Path) -> None:
    """Its incarnation is smaller than its predecessor's, whose lease must run out first."""
    with loaded(tmp_path) as (cluster, load):
        one = load.begin("reader0", 12, gap_s=0.3)
        cluster.wait_a_moment(0.2)
        cluster.kill("rank1")
        cluster.processes["rank1"].child.close()
        cluster.launch("rank1", DAY_BACK)
        cluster.wait_ready("rank1")
        load.drain()
        assert one.state == "failed"
        assert "cp1" in one.said["why"]
        succeed_in_time(load, tmp_path)


@pytest.mark.slow
def test_a_rank_that_was_frozen_while_a_successor_took_its_name_serves_nobody_when_it_wakes(tmp_path: Path) -> None:
    with loaded(tmp_path) as (cluster, load):
        cluster.stop("rank0")
        frozen = cluster.processes["rank0"]
        cluster.move("rank0")  # the frozen one still has the port
        cluster.launch("rank0")
        cluster.wait_ready("rank0")
        succeed_in_time(load, tmp_path)
        frozen.child.resume()
        for _ in range(10):
            succeed(load, tmp_path)
            cluster.wait_a_moment(0.1)
        frozen.must_live = False
        frozen.child.close()


@pytest.mark.slow
def test_a_bootstrap_that_still_knows_a_dead_rank_costs_no_more_than_its_lease(tmp_path: Path) -> None:
    """Prefill can't reach it, and decode asks it first: the other one has the successor."""
    if reason := namespaces_missing():
        pytest.skip(reason)
    with loaded(tmp_path, apart=True) as (cluster, load):
        cluster.hosts.cut("bootstrap0", "prefill")
        cluster.kill("rank0")
        cluster.revive()
        succeed_in_time(load, tmp_path)
        cluster.hosts.heal()
        cut_off(cluster, "bootstrap1", deaf=True, mute=True)
        succeed_in_time(load, tmp_path)
