"""Which way a pull takes: the cheaper one by the figures, the one that was asked for where it can be had."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.transfer.ways import DEVICE_COPY, HOST_COPY, Way, WireCost, Workload, choose_way

NVLINK = WireCost(9e-6, 300e9)
SCATTERED = Workload(64 << 20, 20_000, 8)


def test_many_scattered_pages_are_packed_where_descriptors_are_expensive() -> None:
    choice = choose_way("auto", SCATTERED, NVLINK)
    assert choice.way is Way.STAGED
    assert choice.staged_s is not None
    assert choice.staged_s < choice.direct_s
    assert "20000 descriptors cost more" in choice.explain()


@pytest.mark.parametrize(
    ("load", "cost"),
    [
        (Workload(64 << 20, 4, 8), NVLINK),
        (SCATTERED, WireCost(0.0, 300e9)),
        (Workload(4096, 1, 1), NVLINK),
    ],
    ids=["few runs", "free descriptors", "one page"],
)
def test_pulls_for_which_packing_only_costs_are_direct(load: Workload, cost: WireCost) -> None:
    assert choose_way("auto", load, cost).way is Way.DIRECT


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 20), st.floats(0, 1e-3), st.floats(0, 1e12))
def test_a_backend_that_gathers_is_never_staged_by_itself(
    nbytes: int, num_descriptors: int, each_s: float, rate: float
) -> None:
    load = Workload(nbytes, num_descriptors, 4)
    assert choose_way("auto", load, WireCost(each_s, rate, gathers=True)).way is Way.MAPPED


@given(st.integers(1, 1 << 34), st.integers(1, 1 << 20), st.integers(1, 4096), st.floats(0, 1e-3), st.floats(1e6, 1e12))
def test_the_choice_is_the_one_that_is_estimated_to_be_quicker(
    nbytes: int, num_descriptors: int, num_pieces: int, each_s: float, rate: float
) -> None:
    choice = choose_way("auto", Workload(nbytes, num_descriptors, num_pieces), WireCost(each_s, rate))
    assert choice.staged_s is not None
    assert (choice.way is Way.STAGED) == (choice.staged_s < choice.direct_s)


def test_a_way_that_is_asked_for_is_taken() -> None:
    one = Workload(4096, 1, 1)
    assert choose_way("staged", one, WireCost(0.0, 0.0, gathers=True)).way is Way.STAGED
    assert choose_way("direct", SCATTERED, NVLINK).way is Way.DIRECT


@pytest.mark.parametrize("asked", ["auto", "staged"])
def test_an_obstacle_makes_it_direct_and_is_named(asked: str) -> None:
    choice = choose_way(asked, SCATTERED, NVLINK, "w offers no staging slots")
    assert choice.way is Way.DIRECT
    assert "w offers no staging slots" in choice.explain()
    assert "staged not possible" in choice.explain()


@pytest.mark.parametrize("asked", ["auto", "staged"])
def test_a_page_that_fits_no_slot_makes_it_direct_and_is_named(asked: str) -> None:
    choice = choose_way(asked, Workload(1 << 20, 100_000, None), NVLINK)
    assert choice.way is Way.DIRECT
    assert "does not fit a staging slot" in choice.reason


def test_packing_in_device_memory_pays_where_packing_in_host_memory_would_not() -> None:
    load, cost = Workload(1 << 30, 1000, 8), WireCost(9e-6, 300e9)
    assert choose_way("auto", load, cost, copies=HOST_COPY).way is Way.DIRECT
    assert choose_way("auto", load, cost, copies=DEVICE_COPY).way is Way.STAGED
