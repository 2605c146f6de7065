"""Whole links over every transport, direct and staged: a rank that stops in the middle costs the deadline, no page."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.link.backend_runs import LIMIT_S, TEST_LIMIT_S, over, over_each, run_case

LONG_WATCH_S = 60
NETWORKED = ("nixl-tcp", "mooncake-tcp")
THEN = ("resumes", "is killed", "never resumes")

pytestmark = pytest.mark.timeout(TEST_LIMIT_S)


@pytest.mark.parametrize(("transport", "way", "then"), over_each(THEN))
def test_a_rank_that_stops_costs_the_deadline_and_its_pages_are_handed_out_once_quiet(
    transport: str, way: str, then: str
) -> None:
    run_case("stop", transport, way, then=then)


@over(quick=("direct",))
def test_a_rank_that_stops_as_a_small_pull_begins_costs_the_deadline_as_well(transport: str, way: str) -> None:
    """Where bytes come by themselves, whoever waits for them is not the thread that all requests need."""
    run_case("stop_small", transport, way)


@pytest.mark.slow
@pytest.mark.timeout(TEST_LIMIT_S + LONG_WATCH_S)
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
