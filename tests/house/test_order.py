"""The files that are to come first are there, and do come first."""

from __future__ import annotations

from types import SimpleNamespace

from tests import order
from tests.house.tree import REPO


def test_every_file_that_comes_first_is_there() -> None:
    assert [name for name in order.LONG if not (REPO / name).is_file()] == []


def test_long_files_come_first_and_others_stay_in_order() -> None:
    names = ["tests/a.py", order.LONG[1], "tests/b.py", order.LONG[0], "tests/a.py"]
    items = [SimpleNamespace(path=REPO / name, number=number) for number, name in enumerate(names)]
    order.pytest_collection_modifyitems(SimpleNamespace(rootpath=REPO), items)
    assert [item.number for item in items] == [3, 1, 0, 2, 4]
