"""Slots are handed out once, in the order of asking, and every wait for one ends."""

from __future__ import annotations

import threading

import pytest

from pdlink.backends.slots import SlotPool

DEADLINE_S = 60.0


def never() -> bool:
    return False


def test_a_slot_is_held_by_one_at_a_time() -> None:
    pool = SlotPool(2)
    taken = [pool.try_take(), pool.take(0.0, never)]
    assert sorted(one for one in taken if one is not None) == [0, 1]
    assert pool.try_take() is None
    assert pool.take(0.01, never) is None
    pool.give(1)
    assert pool.take(0.0, never) == 1


def test_the_slot_that_is_wanted_is_given_where_it_is_free() -> None:
    pool = SlotPool(3)
    assert [pool.try_take(wanted) for wanted in (1, 1, 7, 2)] == [1, 0, 2, None]
    pool.give(0)
    pool.give(2)
    assert (pool.try_take(2), pool.num_free) == (2, 1)


def test_a_slot_that_is_given_twice_is_a_bug_that_is_found() -> None:
    pool = SlotPool(1)
    slot = pool.try_take()
    assert slot == 0
    pool.give(0)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give(0)


def test_slots_are_wanted_while_somebody_waits_for_one() -> None:
    pool = SlotPool(1)
    slot = pool.try_take()
    assert slot is not None
    assert not pool.is_wanted
    seen: list[bool] = []

    def look() -> bool:
        seen.append(pool.is_wanted)
        return True

    assert pool.take(5.0, look) is None
    assert seen == [True]
    assert not pool.is_wanted


def test_whoever_waits_first_is_served_first_and_nobody_passes_the_queue() -> None:
    pool = SlotPool(1)
    slot = pool.try_take()
    assert slot is not None
    served: list[int] = []
    got = threading.Semaphore(0)
    gates = [threading.Event() for _ in range(4)]

    def wait(number: int) -> None:
        one = pool.take(DEADLINE_S, never)
        assert one is not None
        served.append(number)
        got.release()
        gates[number].wait(DEADLINE_S)
        pool.give(one)

    threads = []
    for number in range(4):
        threads.append(threading.Thread(target=wait, args=(number,)))
        threads[-1].start()
        while len(pool._waiters) <= number:
            pass
    pool.give(slot)
    for gate in gates:
        assert got.acquire(timeout=DEADLINE_S)
        assert pool.try_take() is None
        gate.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert served == [0, 1, 2, 3]
    assert pool.num_free == 1


def test_a_waiter_that_is_told_to_stop_gives_up_its_place() -> None:
    pool = SlotPool(1)
    assert pool.try_take() == 0
    stop = threading.Event()
    result: list[int | None] = []
    thread = threading.Thread(target=lambda: result.append(pool.take(1000.0, stop.is_set)))
    thread.start()
    while not pool._waiters:
        pass
    stop.set()
    thread.join(DEADLINE_S)
    assert result == [None]
    pool.give(0)
    assert pool.try_take() == 0
