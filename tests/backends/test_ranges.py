"""How many pages of a layer lie in memory: a quick bound that never says more than the check of every page."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.backends.ranges import RangeCheck, as_spans, check_destinations, check_sources, pages_inside
from pdlink.errors import RegionError
from pdlink.transfer.descriptors import GroupMove, LayerTable, PageRuns
from tests.transfer.values import ints

layers = st.lists(
    st.tuples(st.integers(1, 400), st.integers(1, 30), st.integers(0, 9)).map(
        lambda one: (one[0], one[1], sum(one[1:]))
    ),
    min_size=1,
    max_size=3,
)
spans = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 90)), max_size=4).map(
    lambda found: as_spans((100 * at, 100 * at + size) for at, size in dict(found).items())
)


@given(layers, spans, st.integers(0, 12))
def test_a_page_counts_as_inside_exactly_when_the_check_lets_it_pass(found, spans, page):
    base, page_bytes, stride = (ints(column) for column in zip(*found, strict=True))
    _, stop = pages_inside(base, stride, page_bytes, spans)
    table = LayerTable(ints(range(len(found))), base, stride, base, stride, page_bytes)
    move = GroupMove("kv", PageRuns(ints([page]), ints([page]), np.ones(1, dtype=np.int64)), table)
    if 0 <= page < stop:
        check_sources(move, spans, "w")
    else:
        with pytest.raises(RegionError):
            check_sources(move, spans, "w")


runs = st.lists(st.tuples(st.integers(-1, 9), st.integers(0, 9), st.integers(1, 3)), min_size=1, max_size=3)


@given(layers, st.lists(st.tuples(spans, spans, runs), min_size=1, max_size=4))
def test_a_check_that_remembers_refuses_what_the_plain_one_refuses(found, asked):
    base, page_bytes, stride = (ints(column) for column in zip(*found, strict=True))
    table = LayerTable(ints(range(len(found))), base, stride, base, stride, page_bytes)
    kept = RangeCheck()
    for sources, destinations, pages in asked:
        move = GroupMove("kv", PageRuns(*(ints(column) for column in zip(*pages, strict=True))), table)
        asked_for = (move, sources, "w", destinations)
        for _ in range(2):
            assert refused(kept.check, *asked_for) == refused(plain_check, *asked_for)


def plain_check(move, sources, worker_id, destinations):
    check_destinations(move, destinations)
    check_sources(move, sources, worker_id)


def refused(check, *asked_for):
    try:
        check(*asked_for)
    except RegionError as error:
        return str(error)
    return ""
