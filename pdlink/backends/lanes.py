"""Owns the threads that make a library's blocking calls for whoever must not block. It knows no library."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

BEGIN_TIMEOUT_S = 1e-3
"""Whatever has become of a call by then, it is handed over."""


@dataclass(slots=True)
class _Lane:
    thread: ThreadPoolExecutor
    newest: Future[int] | None = None


class Lanes:
    """`count` threads that take turns, each of which makes its calls one after another. For one caller at a time."""

    def __init__(self, count: int, name: str) -> None:
        self._lanes = deque(_Lane(ThreadPoolExecutor(1, name)) for _ in range(count))
        """The next one first."""

    def begin(self, function: Callable[..., int], *arguments: Any) -> Future[int]:
        """Have `function(begun, *arguments)` called, which sets the event `begun` right before it blocks. Returns then
        at the earliest where nothing else is before it, but after `BEGIN_TIMEOUT_S` in any case.

        A thread that is woken gets the interpreter only when its waker lets go of it. A caller that has a good deal to
        do once a read is posted would keep it meanwhile, with nothing on the wire.
        """
        lane = self._lanes[0]
        self._lanes.rotate(-1)
        begun, is_idle = threading.Event(), lane.newest is None or lane.newest.done()
        lane.newest = lane.thread.submit(function, begun, *arguments)
        if is_idle:
            begun.wait(BEGIN_TIMEOUT_S)
        return lane.newest

    def close(self) -> None:
        """Wait for what was begun, and end the threads. Twice is fine."""
        for lane in self._lanes:
            lane.thread.shutdown()
