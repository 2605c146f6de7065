import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.errors import PlanError
from pdlink.transfer.coverage import Coverage
from tests.transfer.values import ints

ROWS = {"kv": 3, "index": 2}
PAGES = {"kv": 5, "index": 8}


@st.composite
def publications(draw):
    """(rows, pages, rectangles): rows given to owners, pages cut into chunks by each; in a random order."""
    num_rows = {"kv": draw(st.integers(1, 6)), "index": draw(st.integers(0, 3))}
    num_pages = {"kv": draw(st.integers(0, 7)), "index": draw(st.integers(0, 7))}
    rectangles = []
    for group, rows in num_rows.items():
        owner = [draw(st.integers(0, 2)) for _ in range(rows)]
        for one in set(owner):
            mine = ints(row for row in range(rows) if owner[row] == one)
            cuts = sorted({0, num_pages[group], *draw(st.lists(st.integers(0, num_pages[group]), max_size=3))})
            rectangles += [(group, mine, start, stop) for start, stop in itertools.pairwise(cuts)]
    return num_rows, num_pages, draw(st.permutations(rectangles))


@given(publications())
def test_coverage_completes_exactly_when_every_cell_has_landed(drawn):
    num_rows, num_pages, rectangles = drawn
    coverage = Coverage(num_rows, num_pages)
    missing = {
        (group, row, page) for group in num_rows for row in range(num_rows[group]) for page in range(num_pages[group])
    }
    assert coverage.is_complete is (not missing)
    for group, rows, start, stop in rectangles:
        coverage.claim(group, rows, start, stop)
        assert coverage.is_complete is (not missing)
        coverage.land(group, rows, start, stop)
        missing -= {(group, int(row), page) for row in rows for page in range(start, stop)}
        assert coverage.num_missing == len(missing)
        assert coverage.is_complete is (not missing)
        first = coverage.first_missing()
        assert first in missing if missing else first is None
    assert coverage.is_complete


@given(publications(), st.data())
def test_a_cell_that_never_lands_keeps_the_request_open_and_is_named(drawn, data):
    num_rows, num_pages, rectangles = drawn
    if not rectangles:
        return
    left = data.draw(st.integers(0, len(rectangles) - 1))
    coverage = Coverage(num_rows, num_pages)
    for at, rectangle in enumerate(rectangles):
        coverage.claim(*rectangle)
        if at != left:
            coverage.land(*rectangle)
    group, rows, start, _ = rectangles[left]
    assert not coverage.is_complete
    assert coverage.first_missing() == (group, int(rows[0]), start)


@given(publications(), st.data())
def test_claims_and_landings_come_in_any_order_and_repeats_are_refused(drawn, data):
    num_rows, num_pages, rectangles = drawn
    coverage = Coverage(num_rows, num_pages)
    for rectangle in rectangles:
        coverage.claim(*rectangle)
        with pytest.raises(PlanError, match="published twice"):
            coverage.claim(*rectangle)
    for rectangle in data.draw(st.permutations(rectangles)):
        before = coverage.num_missing
        coverage.land(*rectangle)
        after = coverage.num_missing
        with pytest.raises(PlanError, match="landed twice"):
            coverage.land(*rectangle)
        assert coverage.num_missing == after < before
    assert coverage.is_complete


def test_three_ranks_and_two_chunks_are_whole_only_with_the_last_chunk_of_the_last_rank():
    coverage = Coverage({"kv": 3}, {"kv": 2})
    for row, chunk in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0)):
        coverage.claim("kv", ints([row]), chunk, chunk + 1)
        coverage.land("kv", ints([row]), chunk, chunk + 1)
        with pytest.raises(PlanError, match=f"row {row}, page {chunk} of group 'kv' was published twice"):
            coverage.claim("kv", ints([row]), chunk, chunk + 1)
        assert not coverage.is_complete
    coverage.claim("kv", ints([2]), 1, 2)
    coverage.land("kv", ints([2]), 1, 2)
    assert coverage.is_complete


def test_a_claim_that_overlaps_is_refused_whole_and_names_the_first_cell():
    coverage = Coverage(ROWS, PAGES)
    coverage.claim("kv", ints([1]), 2, 4)
    with pytest.raises(PlanError, match="row 1, page 3 of group 'kv' was published twice"):
        coverage.claim("kv", ints([0, 1, 2]), 3, 5)
    coverage.claim("kv", ints([0, 2]), 3, 5)


def test_what_was_not_claimed_cannot_land():
    coverage = Coverage(ROWS, PAGES)
    coverage.claim("kv", ints([0, 1]), 0, 2)
    for rows, start, stop in (([0], 1, 3), ([2], 0, 1), ([0, 2], 0, 1)):
        with pytest.raises(PlanError, match="without being claimed"):
            coverage.land("kv", ints(rows), start, stop)
    assert coverage.num_missing == 3 * 5 + 2 * 8


@pytest.mark.parametrize(
    ("group", "rows", "start", "stop"),
    [
        ("kv", [0], -1, 2),
        ("kv", [0], 3, 6),
        ("kv", [0], 3, 2),
        ("kv", [3], 0, 1),
        ("kv", [-1], 0, 1),
        ("kv", [1, 1], 0, 1),
        ("state", [0], 0, 1),
    ],
)
def test_what_is_no_rectangle_of_known_cells_is_refused_and_changes_nothing(group, rows, start, stop):
    coverage = Coverage(ROWS, PAGES)
    coverage.claim("kv", ints([0, 1, 2]), 0, 5)
    for mark in (coverage.claim, coverage.land):
        with pytest.raises(PlanError, match=group):
            mark(group, ints(rows), start, stop)
    assert coverage.num_missing == 3 * 5 + 2 * 8


def test_the_first_cell_that_nobody_published_is_named():
    coverage = Coverage(ROWS, PAGES)
    rows = ints([0, 2])
    assert coverage.first_unclaimed("kv", rows) == (0, 0)
    coverage.claim("kv", ints([0]), 0, 5)
    coverage.claim("kv", ints([2]), 0, 4)
    assert coverage.first_unclaimed("kv", rows) == (2, 4)
    coverage.claim("kv", ints([2]), 4, 5)
    assert coverage.first_unclaimed("kv", rows) is None
    assert coverage.first_unclaimed("kv", ints([])) is None


def test_nothing_to_move_is_complete_at_once():
    for coverage in (
        Coverage({}, {}),
        Coverage({"kv": 3}, {"kv": 0}),
        Coverage({"kv": 3}, {}),
        Coverage({}, {"kv": 4}),
    ):
        assert coverage.is_complete
        assert coverage.first_missing() is None


def test_a_landed_rectangle_without_rows_or_pages_changes_nothing():
    coverage = Coverage(ROWS, PAGES)
    for rows, start, stop in (([], 0, 5), ([0], 2, 2)):
        coverage.claim("kv", ints(rows), start, stop)
        coverage.land("kv", ints(rows), start, stop)
    assert coverage.num_missing == int(np.sum([3 * 5, 2 * 8]))
