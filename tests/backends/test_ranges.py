"""How many pages of a layer lie in memory: a quick bound that never says more than the check of every page."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.backends.ranges import as_spans, check_sources, pages_inside
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
