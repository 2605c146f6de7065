"""Owns the early frames of all requests of a prefill rank: how many are kept, for how long, and whose go when there are
too many. It answers none of them (see `worker`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from pdlink.control.frames import Abort, Release, Subscribe
from pdlink.layout.readers import ReaderSet
from pdlink.prefill.early import Early, EarlyFrame


@dataclass(slots=True)
class _Entry:
    early: Early
    until: float
    route: bytes
    """Who spoke of the request first: its frames are counted as theirs."""
    num_frames: int = 0


class EarlyBook:
    """Early frames by transfer id, for `ttl_s` after the last one, at most `max_frames`. Not thread-safe.

    Beyond that the oldest of the peer that has most of them go, so that a flood from one peer takes no other's place.
    What is lost comes again: a subscribe is repeated, and a request whose release or abort is lost ends with its lease.
    """

    def __init__(self, ttl_s: float, max_frames: int) -> None:
        self.num_dropped = 0
        """Requests whose frames had to go."""
        self._ttl_s = ttl_s
        self._max_frames = max_frames
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._routes: dict[bytes, OrderedDict[str, None]] = {}
        """Route -> the requests that count as its, oldest first."""
        self._shares: dict[bytes, int] = {}
        """Route -> how many frames those have."""
        self._num_frames = 0

    def __len__(self) -> int:
        return len(self._entries)

    def keep(self, transfer_id: str, route: bytes, attempt: int, body: Subscribe | Release | Abort, now: float) -> None:
        entry = self._take(transfer_id)
        if entry is None or entry.until <= now:
            entry = _Entry(Early(), 0.0, route)
        entry.early.keep(route, attempt, body, now)
        entry.until = now + self._ttl_s
        self._put(transfer_id, entry)
        while self._num_frames > self._max_frames and len(self._entries) > 1:
            self._drop_one(entry.route)

    def drop(self, transfer_id: str, readers: ReaderSet, attempt: int) -> None:
        """Forget the frame of an attempt that is over."""
        if entry := self._take(transfer_id):
            entry.early.drop(readers, attempt)
            if entry.early.num_frames:
                self._put(transfer_id, entry)

    def take(self, transfer_id: str, now: float) -> Early | None:
        """The frames of a request, which are kept here no longer."""
        entry = self._take(transfer_id)
        return entry.early if entry and entry.until > now else None

    def take_all(self, now: float) -> list[tuple[str, EarlyFrame]]:
        """Every frame with the request that it is of, oldest request first; none is kept here any longer."""
        taken = [(name, self.take(name, now)) for name in list(self._entries)]
        return [(name, frame) for name, early in taken if early for frame in early.in_order(-math.inf)]

    def expire(self, now: float) -> None:
        """Drop what is past its time."""
        while self._entries:
            transfer_id, entry = next(iter(self._entries.items()))
            if entry.until > now:
                return
            self._take(transfer_id)

    def _drop_one(self, newest: bytes) -> None:
        """The oldest of `newest` where that has more than an equal share, else of whoever has most."""
        share = self._max_frames // len(self._shares)
        route = newest if self._shares[newest] > share else max(self._shares, key=self._shares.__getitem__)
        self._take(next(iter(self._routes[route])))
        self.num_dropped += 1

    def _put(self, transfer_id: str, entry: _Entry) -> None:
        entry.num_frames = entry.early.num_frames
        self._entries[transfer_id] = entry
        self._routes.setdefault(entry.route, OrderedDict())[transfer_id] = None
        self._shares[entry.route] = self._shares.get(entry.route, 0) + entry.num_frames
        self._num_frames += entry.num_frames

    def _take(self, transfer_id: str) -> _Entry | None:
        entry = self._entries.pop(transfer_id, None)
        if entry:
            self._num_frames -= entry.num_frames
            self._shares[entry.route] -= entry.num_frames
            del self._routes[entry.route][transfer_id]
            if not self._routes[entry.route]:
                del self._routes[entry.route], self._shares[entry.route]
        return entry
