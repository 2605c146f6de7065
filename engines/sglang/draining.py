"""Owns which receivers of a room may still have something land in their pages. It ends none of them."""

from __future__ import annotations

import threading
from typing import Protocol


class Drains(Protocol):
    """One receiver."""

    @property
    def is_quiet(self) -> bool:
        """Whether nothing can land in its pages any more."""


class Draining:
    """Thread-safe. A room that is used again has several receivers, and the older ones may not be quiet yet."""

    def __init__(self) -> None:
        self._held: dict[int, list[Drains]] = {}
        self._lock = threading.Lock()

    def hold(self, room: int, receiver: Drains) -> None:
        """Remember a receiver until it is quiet."""
        with self._lock:
            # Quiet ones go here, so that what nobody lets go does not add up.
            for known in list(self._held):
                self._keep(known, [one for one in self._held[known] if not one.is_quiet])
            self._held.setdefault(room, []).append(receiver)

    def let_go(self, room: int, receiver: Drains) -> None:
        """Forget a receiver that the engine has done with, unless something may still land in its pages."""
        with self._lock:
            self._keep(room, [one for one in self._held.get(room, ()) if one is not receiver or not one.is_quiet])

    def is_quiet(self, room: int) -> bool:
        """Whether nothing can land in pages of any receiver of that room."""
        with self._lock:
            return all(one.is_quiet for one in self._held.get(room, ()))

    def _keep(self, room: int, receivers: list[Drains]) -> None:
        if receivers:
            self._held[room] = receivers
        else:
            self._held.pop(room, None)
