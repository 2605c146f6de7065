"""Owns what a prefill worker remembers for a limited time: answers it gave, and frames that came before their request.

Pure: time is passed in. Both books are bounded; the oldest entry makes room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pdlink.control.frames import AbortAck, Verdict

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


@dataclass(slots=True)
class _Entry(Generic[ValueT]):
    value: ValueT
    until: float


class ExpiringBook(Generic[KeyT, ValueT]):
    """Values that live for `ttl_s` after they were last put, at most `max_entries` of them. Not thread-safe."""

    def __init__(self, ttl_s: float, max_entries: int) -> None:
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._entries: OrderedDict[KeyT, _Entry[ValueT]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: KeyT, value: ValueT, now: float) -> None:
        self._entries.pop(key, None)
        self._entries[key] = _Entry(value, now + self._ttl_s)
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def get(self, key: KeyT, now: float) -> ValueT | None:
        entry = self._entries.get(key)
        return entry.value if entry and entry.until > now else None

    def renew(self, key: KeyT, now: float) -> ValueT | None:
        """The value, which lives for `ttl_s` from now on: it is asked for as long as it is needed."""
        value = self.get(key, now)
        if value is not None:
            self.put(key, value, now)
        return value

    def pop(self, key: KeyT, now: float) -> ValueT | None:
        value = self.get(key, now)
        self._entries.pop(key, None)
        return value

    def expire(self, now: float) -> int:
        """Drop what is past its time; returns how many."""
        dropped = 0
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if entry.until > now:
                break
            del self._entries[key]
            dropped += 1
        return dropped


AnswerBook = ExpiringBook[tuple[str, int], Verdict | AbortAck]
"""(transfer id, attempt) -> how that attempt ended here. It is repeated to duplicates, and nothing else is done."""
