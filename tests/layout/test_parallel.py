import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.errors import LayoutError
from pdlink.layout import ParallelSizes, RankCoordinates, ReaderSet
from pdlink.layout.parallel import AXES, read_sizes

SIZE = st.integers(1, 4)


@given(st.builds(ParallelSizes, SIZE, SIZE, SIZE, SIZE))
def test_ranks_are_all_coordinates_once_in_order(sizes):
    ranks = list(sizes.ranks())
    assert len(ranks) == len(set(ranks)) == sizes.num_ranks
    assert ranks == sorted(ranks)
    for rank in ranks:
        sizes.check(rank)


@pytest.mark.parametrize("axis", AXES)
def test_a_coordinate_past_its_size_is_refused_with_both_values(axis):
    sizes = ParallelSizes(2, 2, 2, 2)
    with pytest.raises(LayoutError, match=f"{axis}=2 is outside parallel size {axis}=2"):
        sizes.check(RankCoordinates(**{axis: 2}))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_one_is_refused(axis, size):
    with pytest.raises(LayoutError, match=f"{axis}={size}"):
        ParallelSizes(**{axis: size})


@pytest.mark.parametrize("axis", AXES)
def test_a_negative_coordinate_is_refused(axis):
    with pytest.raises(LayoutError, match=f"{axis}=-1"):
        RankCoordinates(**{axis: -1})


def test_a_shard_group_is_the_ranks_that_differ_in_cp_alone():
    sizes = ParallelSizes(dp=2, pp=2, cp=3, tp=2)
    groups = {}
    for rank in sizes.ranks():
        groups.setdefault(rank.shard_group, []).append(rank.cp)
    assert len(groups) == 8
    assert all(members == [0, 1, 2] for members in groups.values())


def test_sizes_and_ranks_are_read_alike():
    assert str(ParallelSizes(1, 2, 3, 4)) == "dp1pp2cp3tp4"
    assert str(RankCoordinates(1, 2, 3, 4)) == "dp1.pp2.cp3.tp4"


def test_readers_of_one_set_may_differ_in_their_index_alone():
    one = ReaderSet("decode", 0, 2)
    assert one.agrees(ReaderSet("decode", 1, 2))
    assert not one.agrees(ReaderSet("decode", 1, 3))
    assert not one.agrees(ReaderSet("other", 1, 2))


@pytest.mark.parametrize(("index", "count"), [(2, 2), (-1, 2), (0, 0), (0, -1)])
def test_a_reader_outside_its_set_is_refused(index, count):
    with pytest.raises(LayoutError, match=f"reader_index={index} is outside num_readers={count}"):
        ReaderSet("decode", index, count)


def test_a_reader_set_without_a_name_is_refused():
    with pytest.raises(LayoutError, match="name"):
        ReaderSet("")


@given(st.permutations(AXES), st.integers(0, len(AXES)), st.lists(st.integers(1, 4096), min_size=4, max_size=4))
def test_sizes_are_read_as_they_are_written_in_any_order(axes, count, sizes):
    named = dict(zip(axes[:count], sizes, strict=False))
    if named:
        assert read_sizes("".join(f"{axis}{size}" for axis, size in named.items())) == named


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no list of sizes; write each as axis and number, like pp2cp4"),
        ("pp2cp", "is no list of sizes"),
        ("2pp", "is no list of sizes"),
        ("PP2", "is no list of sizes"),
        ("pp2 cp4", "is no list of sizes"),
        ("pp2ep4", "has an axis 'ep'; there are dp, pp, cp, tp"),
        ("pp2cp4pp2", "names pp twice"),
        ("pp0", "pp=0, which must be at least 1"),
        ("pp1234567890", "is no list of sizes"),
    ],
)
def test_text_that_is_no_sizes_is_refused_with_the_reason(text, words):
    with pytest.raises(LayoutError, match=words):
        read_sizes(text)


def test_a_side_may_have_axes_of_its_own():
    assert read_sizes("tp8dcp2", ("pp", "tp", "dcp")) == {"tp": 8, "dcp": 2}
