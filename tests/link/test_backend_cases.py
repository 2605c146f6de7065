"""Whole links over every transport, direct and staged: no page is lost, or written after it was given back."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import processes
from tests.link.transports import TRANSPORTS

ROOT = Path(__file__).parents[2]
LIMIT_S = 240
LONG_WATCH_S = 60
NETWORKED = ("nixl-tcp", "mooncake-tcp")
THEN = ("resumes", "is killed", "never resumes")

pytestmark = pytest.mark.timeout(LIMIT_S + 10)


def over(*, quick: tuple[str, ...]):
    """Parametrises over transports and ways. `quick` of the ways run in every run, the others are slow."""
    params = [
        pytest.param(
            name,
            way,
            id=f"{name}-{way}",
            marks=[pytest.mark.backend(name), *([] if way in quick else [pytest.mark.slow])],
        )
        for name in TRANSPORTS
        for way in ("direct", "staged")
    ]
    return pytest.mark.parametrize(("transport", "way"), params)


def run_case(case: str, transport: str, way: str, limit_s: float = LIMIT_S, **options: object) -> None:
    """Run it in a process of its own and insist on a good end of that."""
    if reason := TRANSPORTS[transport].missing():
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.link.backend_cases", case, transport, way, json.dumps(options)]
    env = {**os.environ, **TRANSPORTS[transport].env}
    done = processes.run(command, cwd=ROOT, env=env, timeout_s=limit_s)
    assert done.returncode == 0, done.stderr[-6000:]


@over(quick=("direct", "staged"))
def test_a_rank_that_owns_nothing_registers_nothing_and_the_others_contribute(transport: str, way: str) -> None:
    run_case("owners", transport, way, num_layers=3, cp=4)


@over(quick=())
def test_layers_that_are_split_unevenly_arrive_exactly(transport: str, way: str) -> None:
    run_case("owners", transport, way, num_layers=10, cp=4)


@over(quick=("direct",))
def test_pages_of_an_aborted_pull_are_free_only_when_the_wire_is_quiet(transport: str, way: str) -> None:
    run_case("late_writes", transport, way, how="abort")


@over(quick=())
def test_pages_of_a_pull_that_ran_out_of_time_are_free_only_when_the_wire_is_quiet(transport: str, way: str) -> None:
    run_case("late_writes", transport, way, how="deadline")


@pytest.mark.parametrize("how", ["withdraw", "abort", "expire", "overwrite"])
@over(quick=())
def test_pages_taken_back_and_reused_under_a_reader_never_make_a_success(transport: str, way: str, how: str) -> None:
    run_case("reuse", transport, way, how=how)


@pytest.mark.parametrize("then", THEN)
@over(quick=())
def test_a_rank_that_stops_costs_the_deadline_and_its_pages_are_handed_out_once_quiet(
    transport: str, way: str, then: str
) -> None:
    run_case("stop", transport, way, then=then)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + LONG_WATCH_S + 10)
@pytest.mark.parametrize("transport", [pytest.param(one, marks=pytest.mark.backend(one)) for one in NETWORKED])
def test_for_a_minute_after_a_rank_has_stopped_nothing_lands_in_pages_that_were_handed_out(transport: str) -> None:
    """Over the engines that move bytes while nobody calls them, or that a peer can keep waiting."""
    limit_s = LIMIT_S + LONG_WATCH_S
    with ThreadPoolExecutor(len(THEN)) as at_once:
        cases = [
            at_once.submit(run_case, "stop", transport, "direct", limit_s, then=then, watch_s=LONG_WATCH_S)
            for then in THEN
        ]
    for case in cases:
        case.result()
