"""Owns what was made of values that come again, as requests of the same two ranks are much alike. It makes nothing.

Tables and batches are their own keys: they are compared by identity, and are held here so that no others can take it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Kept(Generic[K, V]):
    """A value for each of at most `most` keys; one more, and all are forgotten and made anew.

    Threads may share it: a value may then be made twice, and one of them stays.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[K, V] = {}

    def of(self, key: K, make: Callable[[], V]) -> V:
        """The value of `key`, made if it is not here. Raises what `make` raises, and keeps nothing then."""
        found = self._values.get(key)
        return self.put(key, make()) if found is None else found

    def get(self, key: K) -> V | None:
        return self._values.get(key)

    def put(self, key: K, value: V) -> V:
        """Keep `value` in place of any other; returns it."""
        if len(self._values) >= self._most and key not in self._values:
            self._values.clear()
        self._values[key] = value
        return value

    def __len__(self) -> int:
        return len(self._values)
