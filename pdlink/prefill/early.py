"""Owns the frames of one request that came before the engine opened it. It answers none of them (see `worker`)."""

from __future__ import annotations

from typing import TypeAlias

from pdlink.control.frames import Abort, Release, Subscribe
from pdlink.layout.readers import ReaderSet

MAX_READERS = 1024
EarlyFrame: TypeAlias = tuple[bytes, int, Subscribe | Release | Abort]
"""(route, attempt, body)."""


class Early:
    """The newest frame of each reader. Readers of sets that disagree are kept apart, so that none hides another's."""

    def __init__(self) -> None:
        self._frames: dict[ReaderSet, EarlyFrame] = {}

    def keep(self, route: bytes, attempt: int, body: Subscribe | Release | Abort) -> None:
        """Keep a frame. An abort that speaks for an attempt which a newer one has followed is left out, and so is any
        reader past `MAX_READERS`."""
        kept = self._frames.get(body.readers)
        if isinstance(body, Abort) and kept and kept[1] != attempt:
            return
        if kept or len(self._frames) < MAX_READERS:
            self._frames[body.readers] = (route, attempt, body)

    def drop(self, readers: ReaderSet, attempt: int) -> None:
        """Forget the frame of an attempt that is over."""
        kept = self._frames.get(readers)
        if kept and kept[1] == attempt:
            del self._frames[readers]

    def in_order(self) -> list[EarlyFrame]:
        """Readers that want the request first: one of another set must not end it for them."""
        return sorted(self._frames.values(), key=lambda frame: isinstance(frame[2], Abort))
