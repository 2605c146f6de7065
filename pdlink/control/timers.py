"""Owns the timers of a loop: what is due, and how long until the next. It reads no clock and starts no thread."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

Call: TypeAlias = Callable[[], None]


def _nothing() -> None:
    pass


@dataclass(order=True, slots=True)
class Timer:
    """A call that is due at `due`; those due together run in the order in which they were asked for."""

    due: float
    number: int
    call: Call = field(compare=False)
    live: bool = field(default=True, compare=False)

    def cancel(self) -> None:
        """Forget the call, and with it whatever it holds, at once; the entry itself goes when it is due."""
        self.live, self.call = False, _nothing


class Timers:
    """`make` may be called from any thread, the rest by one."""

    def __init__(self) -> None:
        self._heap: list[Timer] = []
        self._numbers = itertools.count()

    def make(self, due: float, call: Call) -> Timer:
        """A timer that is not set yet."""
        return Timer(due, next(self._numbers), call)

    def set(self, timer: Timer) -> None:
        heapq.heappush(self._heap, timer)

    def pop_due(self, now: float) -> Iterator[Call]:
        """The calls that are due, earliest first, each looked at when it is asked for."""
        while self._heap and self._heap[0].due <= now:
            timer = heapq.heappop(self._heap)
            if timer.live:
                yield timer.call

    def wait_s(self, now: float, most_s: float) -> float:
        """Seconds until the next timer, 0 when one is due, at most `most_s`."""
        return min(most_s, max(0.0, self._heap[0].due - now)) if self._heap else most_s

    def clear(self) -> None:
        self._heap.clear()
