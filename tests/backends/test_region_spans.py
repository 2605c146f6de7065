"""Which memory the registered regions cover, by the kind that it is."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pdlink.backends.region_spans import Place, PlacedSpans, merge
from pdlink.layout.regions import MemoryKind, Region
from tests.transfer.values import ints

HOST, FIRST, SECOND = Place(MemoryKind.HOST), Place(MemoryKind.CUDA, 0), Place(MemoryKind.CUDA, 1)


def make_region(start, place=HOST, num_pages=4):
    return Region("latent", 0, start, 64, 64, num_pages, place.memory, place.device)


def test_ranges_are_listed_by_the_memory_that_they_lie_in():
    spans = PlacedSpans()
    for start, place in ((4096, HOST), (1 << 30, FIRST), (1 << 31, SECOND), (1 << 20, HOST)):
        spans.add(make_region(start, place))
    assert spans.of(HOST).tolist() == [[4096, 4096 + 256], [1 << 20, (1 << 20) + 256]]
    assert spans.of(SECOND).tolist() == [[1 << 31, (1 << 31) + 256]]
    assert [start for _, start, _ in spans.all(MemoryKind.CUDA)] == [1 << 30, 1 << 31]
    assert spans.devices() == (0, 1)
    assert [spans.place(ints([start + 100])) for start in (4096, 1 << 30, 1 << 31)] == [HOST, FIRST, SECOND]


def test_an_address_in_no_range_counts_as_host_memory():
    spans = PlacedSpans()
    for place in (HOST, FIRST):
        spans.add(make_region((1 + place.device) << (20 if place == HOST else 30), place))
    assert spans.place(ints([7])) == HOST
    assert PlacedSpans().place(ints([])) == HOST


def test_a_range_that_was_added_twice_stays_until_it_is_removed_twice():
    spans = PlacedSpans()
    region = make_region(4096)
    spans.add(region)
    spans.add(region)
    spans.remove(region)
    assert len(spans.of(HOST)) == 1
    spans.remove(region)
    spans.remove(region)
    assert len(spans.of(HOST)) == 0
    spans.add(region)
    assert len(spans.of(HOST)) == 1


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
    spans = PlacedSpans()
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
