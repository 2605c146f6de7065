"""What was made of a small batch serves the very same batch again, as long as it was checked by the same table."""

import numpy as np
import pytest

from pdlink.backends.kept_plans import MAX_DESCRIPTORS, MAX_PLANS, KeptPlans
from pdlink.errors import RegionError
from pdlink.transfer.descriptors import GroupMove, LayerTable, PageRuns, PullBatch
from tests.transfer.values import ints


def make_batch(num_pages=1):
    pages = ints(range(0, 2 * num_pages, 2))
    table = LayerTable(*(ints([one]) for one in (0, 4096, 64, 8192, 64, 64)))
    return PullBatch("w", (GroupMove("kv", PageRuns(pages, pages, np.ones(num_pages, dtype=np.int64)), table),))


class Maker:
    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return iter((self.calls, -self.calls))


def test_the_same_batch_is_made_once_and_another_one_anew():
    plans, make, table, batch = KeptPlans(), Maker(), object(), make_batch()
    assert [list(plans.parts(batch, table, make)) for _ in range(3)] == [[1, -1]] * 3
    assert list(plans.parts(make_batch(), table, make)) == [2, -2]


def test_a_batch_is_made_anew_once_the_table_has_changed():
    plans, make, batch = KeptPlans(), Maker(), make_batch()
    list(plans.parts(batch, object(), make))
    assert list(plans.parts(batch, object(), make)) == [2, -2]


def test_what_is_made_of_many_descriptors_is_not_kept():
    plans, make, table, batch = KeptPlans(), Maker(), object(), make_batch(MAX_DESCRIPTORS + 1)
    list(plans.parts(batch, table, make))
    assert list(plans.parts(batch, table, make)) == [2, -2]


def test_a_batch_that_is_refused_is_refused_again():
    plans, table, batch = KeptPlans(), object(), make_batch()

    def refuse():
        raise RegionError("no")

    for _ in range(2):
        with pytest.raises(RegionError):
            plans.parts(batch, table, refuse)


def test_the_number_of_plans_is_bounded():
    plans, make, table = KeptPlans(), Maker(), object()
    batches = [make_batch() for _ in range(3 * MAX_PLANS)]
    for batch in batches:
        list(plans.parts(batch, table, make))
    assert len(plans._plans) <= MAX_PLANS
    assert list(plans.parts(batches[-1], table, make)) == [3 * MAX_PLANS, -3 * MAX_PLANS]
