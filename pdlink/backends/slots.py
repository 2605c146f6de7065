"""Owns which of a number of equal slots are free, and who waits for one. It knows no memory and no request."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

LOOK_S = 0.02
"""How often a waiter looks whether it should give up."""


class SlotPool:
    """Slots 0..n-1. Whoever waits first is served first. Thread-safe."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = deque(range(num_slots))
        self._waiters: deque[object] = deque()
        self._changed = threading.Condition()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for a slot."""
        return bool(self._waiters)

    def try_take(self, wanted: int | None = None) -> int | None:
        """A free slot that nobody waits for, or None. It is the one `wanted` where that is free."""
        with self._changed:
            if not self._free or self._waiters:
                return None
            if wanted is None or wanted not in self._free:
                return self._free.popleft()
            self._free.remove(wanted)
            return wanted

    def take(self, timeout_s: float, stop: Callable[[], bool]) -> int | None:
        """A slot, waiting for one up to `timeout_s`; None when that is over, or once `stop` says so."""
        give_up = time.monotonic() + timeout_s
        me = object()
        with self._changed:
            self._waiters.append(me)
            try:
                while not stop():
                    if self._free and self._waiters[0] is me:
                        return self._free.popleft()
                    left = give_up - time.monotonic()
                    if left <= 0:
                        return None
                    self._changed.wait(min(left, LOOK_S))
                return None
            finally:
                self._waiters.remove(me)
                self._changed.notify_all()

    def give(self, slot: int) -> None:
        """Give a slot back that was taken."""
        with self._changed:
            assert 0 <= slot < self.num_slots, f"slot {slot} is none of {self.num_slots}"
            assert slot not in self._free, f"slot {slot} was given back twice"
            self._free.append(slot)
            self._changed.notify_all()
