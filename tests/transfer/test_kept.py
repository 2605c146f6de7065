"""What is kept is made once, for as many keys as were said, and a refusal is never kept."""

from __future__ import annotations

import pytest

from pdlink.transfer.descriptors import LayerTable
from pdlink.transfer.kept import Kept
from tests.transfer.values import ints


def test_a_value_is_made_once() -> None:
    kept: Kept[str, list[int]] = Kept(4)
    first = kept.of("a", lambda: [1])
    assert kept.of("a", lambda: [2]) is first
    assert kept.get("a") is first
    assert kept.get("b") is None


def test_the_number_of_values_is_bounded_and_the_newest_is_there() -> None:
    kept: Kept[int, int] = Kept(4)
    for key in range(1, 100):
        assert kept.of(key, lambda key=key: key) == key
        assert len(kept) <= 4
        assert kept.get(key) == key


def test_a_value_that_is_put_in_place_of_another_forgets_nothing_else() -> None:
    kept: Kept[int, str] = Kept(2)
    kept.put(1, "a")
    kept.put(2, "b")
    kept.put(2, "c")
    assert (kept.get(1), kept.get(2)) == ("a", "c")


def test_nothing_is_kept_of_what_was_refused() -> None:
    kept: Kept[int, int] = Kept(4)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            kept.of(1, lambda: 1 // 0)
    assert len(kept) == 0


def test_tables_are_told_apart_though_they_hold_the_same() -> None:
    one, other = (LayerTable(*(ints([value]) for value in (0, 64, 64, 128, 64, 64))) for _ in range(2))
    kept: Kept[LayerTable, int] = Kept(4)
    assert (kept.of(one, lambda: 1), kept.of(other, lambda: 2), kept.of(one, lambda: 3)) == (1, 2, 1)
