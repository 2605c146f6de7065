"""What becomes of requests while containers of the rig are killed, paused, cut off and restarted.

Callers do not stream, so that the front may try a request again: none may fail, and none may be answered wrongly.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.rig.rig import GROUP_TIMEOUT_S, Rig
from tests.rig.traffic import Account, Traffic

pytestmark = [pytest.mark.rig, pytest.mark.timeout(1800)]

ENGINES = ("prefill-0", "prefill-2", "prefill-sidecar", "decode", "decode-sidecar")
SHORT_PAUSE_S = 2.0
LONG_PAUSE_S = GROUP_TIMEOUT_S + 2.0
"""More than ranks wait for each other in one step, and than a silent peer is waited for (6 s)."""


@pytest.fixture
def traffic(rig: Rig, expected: dict[str, list[int]]) -> Iterator[Traffic]:
    with Traffic(rig, expected) as running:
        running.wait_right(2)
        yield running


def judge(account: Account) -> None:
    assert account.wrong == []
    assert account.failed == []
    assert account.num_right > 0


@pytest.mark.parametrize("service", ENGINES)
def test_no_request_fails_when_a_container_is_killed_and_comes_back(rig: Rig, traffic: Traffic, service: str) -> None:
    rig.kill(service)
    rig.start(service)
    rig.wait_ready()
    traffic.wait_right(2)
    judge(traffic.stop())


def test_no_request_fails_when_each_container_stands_still_for_a_moment(rig: Rig, traffic: Traffic) -> None:
    for service in (*ENGINES, "bootstrap-0", "bootstrap-1"):
        rig.pause(service)
        time.sleep(SHORT_PAUSE_S)
        rig.unpause(service)
        traffic.wait_right(1)
    judge(traffic.stop())


@pytest.mark.parametrize("service", ["prefill-3", "prefill-sidecar"])
def test_no_request_fails_when_a_container_stands_still_for_long(rig: Rig, traffic: Traffic, service: str) -> None:
    rig.pause(service)
    time.sleep(LONG_PAUSE_S)
    rig.unpause(service)
    rig.wait_ready()
    traffic.wait_right(2)
    judge(traffic.stop())


@pytest.mark.parametrize("service", ["prefill-1", "prefill-sidecar", "decode-sidecar"])
def test_no_request_fails_when_a_container_is_cut_off_and_found_again(rig: Rig, traffic: Traffic, service: str) -> None:
    rig.disconnect(service)
    time.sleep(LONG_PAUSE_S)
    rig.connect(service)
    if service.endswith("-sidecar"):
        # UCX reads routes once in a process (ucs/sys/netlink.c), and has none for an interface that has come since.
        rig.restart(service)
    rig.wait_ready()
    traffic.wait_right(2)
    judge(traffic.stop())


@pytest.mark.parametrize("service", ["bootstrap-0", "bootstrap-1"])
def test_requests_go_on_without_one_bootstrap_and_it_learns_all_again(rig: Rig, traffic: Traffic, service: str) -> None:
    rig.kill(service)
    traffic.wait_right(3)
    rig.start(service)
    traffic.wait_right(1)
    # Now the other one goes, so that what came back has to know what it lost.
    other = "bootstrap-1" if service == "bootstrap-0" else "bootstrap-0"
    rig.kill(other)
    traffic.wait_right(3)
    rig.start(other)
    judge(traffic.stop())


def test_no_request_fails_while_all_prefill_ranks_are_restarted_in_turn(rig: Rig, traffic: Traffic) -> None:
    for rank in range(4):
        rig.restart(f"prefill-{rank}")
        rig.wait_ready()
        traffic.wait_right(2)
    judge(traffic.stop())


def test_a_front_that_was_killed_serves_again(rig: Rig, traffic: Traffic) -> None:
    rig.kill("front")
    rig.start("front")
    rig.wait_ready()
    traffic.wait_right(2)
    account = traffic.stop()
    assert account.wrong == []
