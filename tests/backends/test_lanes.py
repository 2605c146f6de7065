"""Blocking calls are made in turns, and each is under way when whoever asked for it goes on."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from pdlink.backends import lanes
from pdlink.backends.lanes import Lanes

DEADLINE_S = 60.0


def test_a_call_has_begun_when_its_caller_goes_on_unless_another_is_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "BEGIN_TIMEOUT_S", DEADLINE_S)
    gate, entered = threading.Event(), []

    def call(begun: threading.Event, number: int) -> int:
        entered.append(number)
        begun.set()
        assert gate.wait(DEADLINE_S)
        return number

    with closing(Lanes(2, "test")) as made:
        calls = [made.begin(call, 0), made.begin(call, 1)]
        assert entered == [0, 1]
        calls += [made.begin(call, number) for number in (2, 3, 4)]  # waiting for these would take the deadline
        assert entered == [0, 1]
        assert not any(one.done() for one in calls)
        gate.set()
        assert [one.result(DEADLINE_S) for one in calls] == [0, 1, 2, 3, 4]
        assert [made.begin(call, 5).result(DEADLINE_S), entered[-1]] == [5, 5]
    made.close()


def test_a_call_that_fails_before_it_begins_keeps_nobody() -> None:
    def call(begun: threading.Event) -> int:
        raise ValueError("no")

    with closing(Lanes(1, "test")) as made:
        with pytest.raises(ValueError, match="no"):
            made.begin(call).result(DEADLINE_S)
        assert made.begin(lambda begun: begun.set() or 7).result(DEADLINE_S) == 7


def test_calls_that_wait_are_made_before_the_end() -> None:
    made, done = Lanes(1, "test"), []
    for number in range(3):
        made.begin(lambda begun, number: begun.set() or done.append(number) or number, number)
    made.close()
    assert done == [0, 1, 2]
