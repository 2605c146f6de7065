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
        self._heard: dict[ReaderSet, float] = {}

    def keep(self, route: bytes, attempt: int, body: Subscribe | Release | Abort, now: float) -> None:
        """Keep a frame. An abort that speaks for an attempt which a newer one has followed is left out, and so is any
        reader past `MAX_READERS`."""
        kept = self._frames.get(body.readers)
        if isinstance(body, Abort) and kept and kept[1] != attempt:
            return
        if kept or len(self._frames) < MAX_READERS:
            self._frames[body.readers] = (route, attempt, body)
            self._heard[body.readers] = now

    def drop(self, readers: ReaderSet, attempt: int) -> None:
        """Forget the frame of an attempt that is over."""
        kept = self._frames.get(readers)
        if kept and kept[1] == attempt:
            del self._frames[readers], self._heard[readers]

    @property
    def num_frames(self) -> int:
        return len(self._frames)

    def in_order(self, heard_since: float) -> list[EarlyFrame]:
        """Readers that want the request first: one of another set must not end it for them.

        Whoever waits repeats its subscribe. One that has not since `heard_since` is dead, and must not keep others out.
        """
        alive = [
            frame
            for readers, frame in self._frames.items()
            if not isinstance(frame[2], Subscribe) or self._heard[readers] >= heard_since
        ]
        return sorted(alive, key=lambda frame: isinstance(frame[2], Abort))
