"""Owner tables of shard groups, and the bytes that follow from them."""

from __future__ import annotations

import pytest

from pdlink.errors import LayoutError
from pdlink.layout import CacheLayout, LayerPlan, ParallelSizes, PlanKind, RankCoordinates
from pdlink.layout.components import index_k, latent
from pdlink.memory.owners import EVERYONE, ShardOwners, owned_nbytes, scratch_nbytes

LAYOUT = CacheLayout(10, (latent(64, range(10), bytes_per_token=656), index_k(64, (0, 1, 9))))


def owners_of(sizes: ParallelSizes, kind: PlanKind = PlanKind.SPLIT, **at: int) -> ShardOwners:
    return ShardOwners.of(LAYOUT, LayerPlan.balanced(LAYOUT, sizes, kind), RankCoordinates(**at))


def test_the_table_follows_the_plan() -> None:
    owners = owners_of(ParallelSizes(cp=4))
    assert [owners.owner(("latent", layer)) for layer in range(10)] == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert [owners.owner(("index_k", layer)) for layer in (0, 1, 9)] == [0, 0, 3]
    assert owners.of_rank(3) == {"latent": (8, 9), "index_k": (9,)}
    assert owners.of_rank(1) == {"latent": (3, 4, 5)}
    assert all(owners.is_split(key) for key in owners.table)


def test_other_stages_are_not_in_the_table_and_ranks_are_those_of_the_group() -> None:
    owners = owners_of(ParallelSizes(pp=2, cp=2, tp=2), pp=1, cp=1, tp=1)
    assert sorted({layer for _, layer in owners.table}) == [5, 6, 7, 8, 9]
    assert owners.owner(("latent", 5)) == 0
    assert owners.owner(("latent", 8)) == 1
    assert not owners.is_split(("latent", 0))
    with pytest.raises(LayoutError, match="'latent' layer 0"):
        owners.owner(("latent", 0))


@pytest.mark.parametrize("sizes", [ParallelSizes(cp=3), ParallelSizes(cp=1)])
def test_what_everyone_has_is_not_split(sizes: ParallelSizes) -> None:
    owners = owners_of(sizes, PlanKind.REPLICATED)
    assert set(owners.table.values()) == {EVERYONE}
    assert owners.split_components() == ()
    assert owners.remote_components(0) == frozenset()
    assert owners.of_rank(0) == {"latent": tuple(range(10)), "index_k": (0, 1, 9)}


def test_a_group_of_one_owns_all_and_splits_nothing() -> None:
    owners = owners_of(ParallelSizes(cp=1))
    assert not any(owners.is_split(key) for key in owners.table)
    assert owners.remote_components(0) == frozenset()


def test_scratch_is_counted_for_components_that_are_read_remotely() -> None:
    alone = CacheLayout(10, (latent(64, range(10), bytes_per_token=656), index_k(64, (0, 1))))
    owners = ShardOwners.of(alone, LayerPlan.balanced(alone, ParallelSizes(cp=4)), RankCoordinates())
    assert scratch_nbytes(alone, owners, 0, 7, 2) == 2 * 7 * 64 * 656
    assert scratch_nbytes(alone, owners, 1, 7, 3) == 3 * 7 * 64 * (656 + 132)
    assert owned_nbytes(alone, owners.of_rank(0), 7) == 7 * 64 * (3 * 656 + 2 * 132)
    assert owned_nbytes(alone, {}, 7) == 0


def test_tables_that_differ_have_other_digests() -> None:
    one, other = owners_of(ParallelSizes(cp=4)), owners_of(ParallelSizes(cp=3))
    assert one.digest == owners_of(ParallelSizes(cp=4), cp=2).digest
    assert one.digest != other.digest
    assert ShardOwners({("latent", 0): 0}, 2).digest != ShardOwners({("latent", 0): 1}, 2).digest


def test_an_owner_outside_the_group_is_refused() -> None:
    with pytest.raises(LayoutError, match="owner 2 of 'latent' layer 0"):
        ShardOwners({("latent", 0): 2}, 2)


def test_owned_layers_must_be_those_of_the_table() -> None:
    owners = owners_of(ParallelSizes(cp=4))
    owners.check_owned(1, {"latent": (3, 4, 5), "index_k": ()})
    with pytest.raises(LayoutError, match=r"shard rank 1 is to own 'latent' layers \[3, 4\].*\[3, 4, 5\]"):
        owners.check_owned(1, {"latent": (3, 4)})
