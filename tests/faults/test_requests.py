"""Requests that meet each other: one aborted before the next, two of one id, two readers of one, and one of nothing."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults import counts, episode
from tests.faults.cluster import Cluster, Plan, running, said
from tests.faults.hosts import loopback, namespaces, namespaces_missing
from tests.faults.load import Load
from tests.faults.shape import NUM_PAGES, VERDICT_DEADLINE_S
from tests.faults.table import wanted_hashes
from tests.link.transports import TRANSPORTS

MOST = NUM_PAGES * 3 // 4
SLOW_MBIT = 20
MIDDLE_S = 0.3
"""A sixth of what the bytes of the first request take on that wire."""
WATCH_S = 1.2

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]


class Heard:
    """What the processes of a cluster say of requests."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.lines: list[tuple[str, dict[str, Any]]] = []
        cluster.on_said = lambda name, line: self.lines.append((name, line))

    def of(self, name: str, key: str, transfer_id: str) -> list[dict[str, Any]]:
        return [line for who, line in self.lines if who == name and line.get(key) == transfer_id]

    def wait(self, name: str, key: str, transfer_id: str) -> dict[str, Any]:
        """The first line of that kind."""
        text = f"{name} says nothing of {key} {transfer_id}"
        self.cluster.wait_for(lambda: bool(self.of(name, key, transfer_id)), VERDICT_DEADLINE_S, text)
        return self.of(name, key, transfer_id)[0]


@contextlib.contextmanager
def hearing(logs: Path, transport: str = "ipc", readers: int = 1, *, apart: bool = False) -> Iterator[Heard]:
    """A cluster that has warmed up, and what it says from then on."""
    if reason := TRANSPORTS[transport].missing() or (namespaces_missing() if apart else ""):
        pytest.skip(reason)
    plan = Plan(TRANSPORTS[transport], num_bootstraps=1, num_readers=readers)
    with contextlib.ExitStack() as stack:
        hosts = namespaces(stack, plan.hosts) if apart else loopback(plan.hosts)
        cluster = stack.enter_context(running(plan, hosts, logs))
        episode.warm_up(Load(cluster, random.Random(1)))
        yield Heard(cluster)


def serve(cluster: Cluster, transfer_id: str, num_pages: int, chunks: int = 1, gap_s: float = 0.0) -> None:
    for rank in cluster.plan.ranks:
        cluster.tell(rank, do="serve", id=transfer_id, pages=num_pages, chunks=chunks, gap_s=gap_s)


def assert_right(line: dict[str, Any], transfer_id: str, num_pages: int) -> None:
    assert line["state"] == "done", line.get("why")
    assert line["ends"] == 1
    assert line["hashes"] == wanted_hashes(transfer_id, num_pages, episode.layout_line())


def assert_all_back(heard: Heard, transfer_id: str) -> None:
    """Every rank and reader has each page once."""
    for rank in heard.cluster.plan.ranks:
        assert heard.wait(rank, "ended", transfer_id)["state"] == "released"
    for name, one in counts.look(heard.cluster).items():
        assert one["census"]["free_pages"] == NUM_PAGES, name


@pytest.mark.parametrize(
    "transport",
    [
        pytest.param(one, marks=[pytest.mark.backend(one), *marks])
        for one, marks in (("nixl-tcp", []), ("mooncake-tcp", [pytest.mark.slow]), ("ipc", [pytest.mark.slow]))
    ],
)
def test_pages_of_an_aborted_request_go_to_the_next_one_which_is_right(transport: str, tmp_path: Path) -> None:
    """Over a slow wire, where there is one, and in the middle of publishing; both need most of the pool."""
    with hearing(tmp_path, transport, apart=True) as heard:
        cluster = heard.cluster
        cluster.hosts.slow("prefill", SLOW_MBIT)
        cluster.tell("reader0", do="receive", id="a", pages=MOST)
        serve(cluster, "a", MOST, *((4, 0.6) if transport == "ipc" else (1, 0.0)))
        cluster.wait_a_moment(MIDDLE_S)
        cluster.tell("reader0", do="abort", id="a")
        cluster.tell("reader0", do="receive", id="b", pages=MOST)
        serve(cluster, "b", MOST)
        aborted = heard.wait("reader0", "ended", "a")
        assert aborted["state"] == "aborted"
        cluster.wait_a_moment(WATCH_S)
        settled = cluster.ask("reader0", do="settle")
        assert settled is not None
        assert settled["later"]["a"]["hashes"] == aborted["hashes"], "pages changed after their request had ended"
        assert settled["touched"] == ""
        line = heard.wait("reader0", "ended", "b")
        assert_right(line, "b", MOST)
        for rank in cluster.plan.ranks:
            assert heard.wait(rank, "ended", "a")["state"] == "aborted"
        assert_all_back(heard, "b")


@pytest.mark.slow
@pytest.mark.backend("ipc")
def test_an_id_in_use_is_refused_and_the_first_request_unaffected_and_the_id_free_again_after_it(
    tmp_path: Path,
) -> None:
    with hearing(tmp_path) as heard:
        cluster = heard.cluster
        for again in (False, True):
            heard.lines.clear()
            cluster.tell("reader0", do="receive", id="t", pages=4)
            cluster.tell("reader0", do="receive", id="t", pages=4)
            assert "'t'" in heard.wait("reader0", "refused", "t")["why"], f"{again=}"
            serve(cluster, "t", 4)
            assert_right(heard.wait("reader0", "ended", "t"), "t", 4)
            assert_all_back(heard, "t")
            assert len(heard.of("reader0", "ended", "t")) == 1


@pytest.mark.slow
@pytest.mark.backend("ipc")
def test_a_second_reader_that_comes_after_the_first_has_released_is_served_before_pages_go_back(
    tmp_path: Path,
) -> None:
    with hearing(tmp_path, readers=2) as heard:
        cluster = heard.cluster
        cluster.tell("reader0", do="receive", id="t", pages=4, reader=[0, 2])
        serve(cluster, "t", 4)
        assert_right(heard.wait("reader0", "ended", "t"), "t", 4)
        cluster.wait_a_moment(0.5)
        assert not any(heard.of(rank, "ended", "t") for rank in cluster.plan.ranks)
        cluster.tell("reader1", do="receive", id="t", pages=4, reader=[1, 2])
        assert_right(heard.wait("reader1", "ended", "t"), "t", 4)
        assert_all_back(heard, "t")
        assert all(len(heard.of(rank, "ended", "t")) == 1 for rank in cluster.plan.ranks)


@pytest.mark.slow
@pytest.mark.backend("ipc")
@pytest.mark.parametrize("aborted", [False, True])
def test_a_request_of_nothing_ends_once_and_releases_every_rank(aborted: bool, tmp_path: Path) -> None:
    with hearing(tmp_path) as heard:
        cluster = heard.cluster
        serve(cluster, "t", 4)
        cluster.tell("reader0", do="receive", id="t", pages=0, held=4)
        if aborted:
            cluster.tell("reader0", do="abort", id="t")
        line = heard.wait("reader0", "ended", "t")
        assert line["state"] in ("done", "aborted") if aborted else line["state"] == "done", said(tmp_path)
        for rank in cluster.plan.ranks:
            assert heard.wait(rank, "ended", "t")["state"] in ("released", "aborted"), said(tmp_path)
        cluster.wait_a_moment(0.3)
        assert len(heard.of("reader0", "ended", "t")) == 1
