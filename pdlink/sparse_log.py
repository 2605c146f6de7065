"""Owns log lines that somebody outside can cause as often as they like: each kind is written once in a while, with a
count of those left out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable

INTERVAL_S = 60.0
MAX_REMEMBERED = 1024


class SparseLog:
    """Warnings of one logger, each kind of them once in `INTERVAL_S`. Thread-safe.

    Of more than `MAX_REMEMBERED` kinds the one that was heard of first is forgotten.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._said: dict[Hashable, tuple[float, int]] = {}
        self._lock = threading.Lock()

    def warn(self, kind: Hashable, text: str, *args: object) -> None:
        """Write `text % args`, unless a line of this kind was written a moment ago."""
        with self._lock:
            now = self._clock()
            said_at, unsaid = self._said.get(kind, (now - INTERVAL_S, 0))
            is_due = now - said_at >= INTERVAL_S
            if len(self._said) >= MAX_REMEMBERED and kind not in self._said:
                del self._said[next(iter(self._said))]
            self._said[kind] = (now, 0) if is_due else (said_at, unsaid + 1)
        if is_due:
            more = f" ({unsaid} more since the last such line)" if unsaid else ""
            self._log.warning(text + "%s", *args, more)
