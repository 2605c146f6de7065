"""Which memory the registered regions cover."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pdlink.backends.mooncake_spans import RegionSpans, merge
from pdlink.layout.regions import Region

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
