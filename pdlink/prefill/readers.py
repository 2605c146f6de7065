"""Owns who reads one request on one prefill rank: their set, the attempt of each reader, and whose place was taken.

One attempt reads for each reader of the set. One whose place a newer attempt took never reads again: what was packed
for it has been given to others meanwhile. Pure: time is passed in, and nothing is sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pdlink.control.frames import PageSpan
from pdlink.layout.readers import ReaderSet
from pdlink.prefill.publication import WHOLE_PAGES, Parts
from pdlink.transfer.ahead import Ahead


@dataclass(slots=True)
class Reader:
    """One reader of the set.

    `seen` is the sequence up to which Ready frames were sent to its current route; `through` that it has released.
    `spans` is what it asked for, None where it has not subscribed.
    """

    index: int
    attempt: int
    route: bytes
    heard: float
    seen: int = 0
    through: bool = False
    spans: tuple[PageSpan, ...] | None = None
    ahead: Ahead | None = None
    parts: Parts = WHOLE_PAGES
    """What it takes of pages, where that is not all."""
    told: int = 0
    """Sequence up to which publications were announced to it ever: none is staged unasked twice."""
    rival: float | None = None
    """When a newer attempt last asked for its place."""


class ReaderTable:
    """The readers of one request. One that is not heard for `silence_s` is taken for dead. Not thread-safe."""

    def __init__(self, silence_s: float) -> None:
        self.set: ReaderSet | None = None
        """What the readers agree on, once there is one."""
        self._silence_s = silence_s
        self._readers: dict[int, Reader] = {}
        self._replaced: set[int] = set()

    def __iter__(self) -> Iterator[Reader]:
        return iter(self._readers.values())

    @property
    def are_through(self) -> bool:
        return self.set is not None and sum(one.through for one in self) == self.set.num_readers

    def get(self, readers: ReaderSet) -> Reader | None:
        return self._readers.get(readers.reader_index)

    def is_stranger(self, readers: ReaderSet) -> bool:
        return self.set is not None and not self.set.agrees(readers)

    def is_replaced(self, attempt: int) -> bool:
        """Whether a newer attempt has taken its place."""
        return attempt in self._replaced

    def is_reading(self, attempt: int) -> bool:
        return any(one.attempt == attempt and not one.through for one in self)

    def attempts(self) -> tuple[int, ...]:
        """Those that have taken part."""
        return (*(one.attempt for one in self), *self._replaced)

    def must_wait(self, readers: ReaderSet, attempt: int, now: float) -> bool:
        """Whether another attempt of that reader is at work, or has been through."""
        reader = self.get(readers)
        if reader is None or reader.attempt == attempt or self.is_stranger(readers) or self.is_replaced(attempt):
            return False
        return reader.through or not self._is_silent(reader, now)

    def wait(self, readers: ReaderSet, now: float) -> None:
        """An attempt waits for the place of another."""
        if reader := self.get(readers):
            reader.rival = now

    def admit(self, readers: ReaderSet, attempt: int, route: bytes, now: float) -> Reader:
        """The reader of `attempt`, in the place of a silent one of its index where there is one."""
        self.set = self.set or readers
        reader = self.get(readers)
        if reader and reader.attempt != attempt:
            self._replaced.add(reader.attempt)
            reader = None
        if reader is None:
            reader = self._readers[readers.reader_index] = Reader(readers.reader_index, attempt, route, now)
        reader.route, reader.heard = route, now
        return reader

    def note(self, readers: ReaderSet, attempt: int, route: bytes, now: float) -> Reader:
        """Whoever has that place; `attempt` where nobody has."""
        found = Reader(readers.reader_index, attempt, route, now)
        return self._readers.setdefault(readers.reader_index, found)

    def dead(self, now: float, awake_since: float) -> Reader | None:
        """One that is still to read, and has not been heard for too long; nobody else wants its place.

        `awake_since`: what came before that counts for no silence, because this process did not listen.
        """
        for one in self:
            is_wanted = one.rival is not None and now - one.rival <= self._silence_s
            is_reading = one.spans is not None and not one.through
            if is_reading and not is_wanted and now - max(one.heard, awake_since) > self._silence_s:
                return one
        return None

    def wanted_from(self) -> Mapping[str, int] | None:
        """The least page position that a reader wants, per page group, once all have subscribed."""
        spans = [one.spans for one in self if one.spans is not None]
        if self.set is None or len(spans) < self.set.num_readers:
            return None
        first: dict[str, int] = {}
        for span in itertools.chain.from_iterable(spans):
            first[span.group] = min(first.get(span.group, span.first_page), span.first_page)
        return first

    def _is_silent(self, reader: Reader, now: float) -> bool:
        return now - reader.heard > self._silence_s
