"""Which memory the registered regions cover, and that a pull stays inside."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.backends.mooncake_spans import RegionSpans, check_inside, merge
from pdlink.errors import RegionError
from pdlink.layout.regions import MAX_ADDRESS, Region
from tests.transfer.values import ints

SPANS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 12)).map(lambda one: (one[0], one[0] + one[1])), max_size=8
)


def region(start, stride, page_bytes, num_pages):
    return Region("kv", 0, start, stride, page_bytes, num_pages)


@given(SPANS)
def test_merged_spans_cover_the_same_bytes_and_never_overlap(spans):
    merged = merge(sorted(spans))
    assert {byte for span in merged for byte in range(*span)} == {byte for span in spans for byte in range(*span)}
    assert all(one[1] <= other[0] for one, other in pairwise(merged))


def test_spans_that_only_touch_stay_apart():
    assert merge([(10, 20), (20, 30)]) == [(10, 20), (20, 30)]


def test_a_region_counts_until_it_was_removed_as_often_as_it_was_added():
    spans = RegionSpans()
    one, other = region(100, 20, 10, 3), region(110, 20, 10, 3)
    spans.add(one)
    spans.add(one)
    spans.add(other)
    assert spans.merged() == [(100, 160)]
    spans.remove(one)
    assert spans.merged() == [(100, 160)]
    spans.remove(one)
    assert spans.merged() == [(110, 160)]
    spans.remove(one)
    spans.remove(other)
    assert spans.merged() == []


@given(
    SPANS,
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), max_size=3),
)
def test_a_pull_passes_exactly_when_each_layers_pages_lie_in_one_span(spans, layers, runs):
    merged = merge(sorted(spans))
    base, gap, nbytes = (ints(column) for column in zip(*layers, strict=True))
    page, count = (ints(column) for column in zip(*runs, strict=True)) if runs else (ints([]), ints([]))
    stride = nbytes + gap

    def extent(row):
        pages = [first + step for first, length in runs for step in range(length)]
        return base[row] + min(pages) * stride[row], base[row] + max(pages) * stride[row] + nbytes[row]

    fits = not runs or all(
        any(start <= extent(row)[0] and extent(row)[1] <= stop for start, stop in merged) for row in range(len(layers))
    )
    if fits:
        check_inside(base, stride, nbytes, page, count, merged, "destination")
    else:
        with pytest.raises(RegionError, match=r"destination 0x.* is in no registered region"):
            check_inside(base, stride, nbytes, page, count, merged, "destination")


@pytest.mark.parametrize(
    ("page", "count", "stride"), [(-1, 1, 16), (1 << 61, 1, 16), (0, 1 << 61, 16), (3, 1, 1 << 62)]
)
def test_pages_outside_the_address_space_are_refused(page, count, stride):
    column = [np.array([one], dtype=np.int64) for one in (1 << 20, stride, 16, page, count)]
    with pytest.raises(RegionError, match=r"source of w0: pages .* reach outside the address space"):
        check_inside(*column, [(1, MAX_ADDRESS)], "source of w0")
