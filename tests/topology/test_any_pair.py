"""Random prefill instances and random decode instances of one model: every byte of every decode rank comes out, and no
other byte is touched, whichever way and backend moves them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy

from pdlink.backends.base import Backend
from pdlink.backends.ipc import IpcBackend
from tests.topology.quiet import Here
from tests.topology.site import run, run_damaged
from tests.topology.strategies import Case, cases


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """A line for each request would cost more than the request."""
    logging.disable(logging.INFO)
    yield
    logging.disable(logging.NOTSET)


@settings(max_examples=20)
@given(cases())
def test_any_pair_moves_every_byte_and_no_other_over_ipc(case: Case) -> None:
    run(case, IpcBackend)


@settings(max_examples=20)
@given(cases())
def test_any_pair_moves_every_byte_and_no_other_directly(case: Case) -> None:
    run(case, Here)


@settings(max_examples=10)
@given(cases(ways=["staged"]))
def test_any_pair_moves_every_byte_and_no_other_through_staging(case: Case) -> None:
    run(case, Here)


@pytest.mark.parametrize("num_pairs", [20, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.thorough])])
def test_a_byte_that_is_damaged_after_it_was_published_is_never_delivered_as_a_success(num_pairs: int) -> None:
    found: list[bool] = []

    @settings(max_examples=num_pairs)
    @given(cases(ways=["direct", "staged"], digested=True))
    def damage(case: Case) -> None:
        found.append(run_damaged(case, Here))

    damage()
    assert sum(found) > num_pairs // 4  # of the others, nobody took that byte, or had it before


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("num_pairs", [120, pytest.param(1000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("wanted", "over"),
    [(cases(), IpcBackend), (cases(), Here), (cases(ways=["staged", "auto"]), Here)],
    ids=["over-ipc", "directly", "through-staging"],
)
def test_the_same_holds_for_many_pairs(wanted: SearchStrategy[Case], over: type[Backend], num_pairs: int) -> None:
    @settings(max_examples=num_pairs)
    @given(wanted)
    def run_all(case: Case) -> None:
        run(case, over)

    run_all()
