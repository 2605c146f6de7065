import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.errors import LayoutError
from pdlink.layout import ParallelSizes, Part, PartKind, RankCoordinates, ReaderSet
from pdlink.layout.parallel import AXES

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


def test_a_part_is_one_of_equal_slices():
    assert Part() == Part(PartKind.WHOLE, 0, 1)
    assert Part(PartKind.HEADS, 3, 4).index == 3


@pytest.mark.parametrize(
    ("kind", "index", "count"),
    [(PartKind.HEADS, 4, 4), (PartKind.HEADS, -1, 4), (PartKind.SUB_PAGE, 0, 0), (PartKind.WHOLE, 0, 2)],
)
def test_a_part_that_is_no_slice_is_refused(kind, index, count):
    with pytest.raises(LayoutError, match=f"part {index} of {count}"):
        Part(kind, index, count)
