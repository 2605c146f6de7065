"""Whole links over every transport, direct and staged: nothing lands in the pages of a pull that was given up."""

from __future__ import annotations

import pytest

from tests.link.backend_runs import TEST_LIMIT_S, over, run_case

pytestmark = pytest.mark.timeout(TEST_LIMIT_S)


@over(quick=("direct",))
def test_pages_of_an_aborted_pull_are_free_only_when_the_wire_is_quiet(transport: str, way: str) -> None:
    run_case("late_writes", transport, way, how="abort")


@over(quick=())
def test_pages_of_a_pull_that_ran_out_of_time_are_free_only_when_the_wire_is_quiet(transport: str, way: str) -> None:
    run_case("late_writes", transport, way, how="deadline")
