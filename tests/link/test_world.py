"""Random lives of whole links: whatever is lost, repeated, reordered, withdrawn, aborted, restarted or stopped, nothing
reports bytes that are not its own, and everything ends.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlink.transfer.states import ReceiverState
from tests.link.world.lives import walk


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Faults are what these tests are made of; a line for each would cost more than the test."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@settings(max_examples=60)
@given(st.integers(0, 1 << 32))
def test_whatever_happens_no_wrong_byte_is_a_success_and_everything_ends(seed: int) -> None:
    walk(random.Random(seed), 250)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("num_lives", [100, pytest.param(1000, marks=pytest.mark.thorough)])
def test_the_same_holds_in_longer_lives(num_lives: int) -> None:
    for seed in range(num_lives):
        walk(random.Random(seed), 700)


def test_lives_end_in_every_way() -> None:
    """Lives in which all requests failed would prove nothing."""
    ends: Counter[ReceiverState] = Counter()
    for seed in range(20):
        made = walk(random.Random(seed), 400)
        ends.update(one.merge.state for reader in made.readers for one in reader.attempts)
    assert all(ends[state] >= 3 for state in ReceiverState if state.is_final), ends
