"""Whole links over every transport, direct and staged: each owner's layers arrive, however they are spread."""

from __future__ import annotations

import pytest

from tests.link.backend_runs import TEST_LIMIT_S, over, run_case

pytestmark = pytest.mark.timeout(TEST_LIMIT_S)


@over(quick=("direct", "staged"))
def test_a_rank_that_owns_nothing_registers_nothing_and_the_others_contribute(transport: str, way: str) -> None:
    run_case("owners", transport, way, num_layers=3, cp=4)


@over(quick=())
def test_layers_that_are_split_unevenly_arrive_exactly(transport: str, way: str) -> None:
    run_case("owners", transport, way, num_layers=10, cp=4)
