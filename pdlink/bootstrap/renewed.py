"""Owns values that are read from files, and read again when the files change. It knows nothing of what is in them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from pdlink.errors import ConfigError

log = logging.getLogger("pdlink.bootstrap")
LOOK_INTERVAL_S = 1.0

T = TypeVar("T")


class Renewed(Generic[T]):
    """The value of `read`, which is called again when one of `paths` has changed. Thread-safe.

    The first read raises what `read` raises. A later one that fails (half of a new pair is there, say) is logged, and
    the value before stays until the files change again.
    """

    def __init__(self, paths: Iterable[str | None], read: Callable[[], T]) -> None:
        self._paths = tuple(path for path in paths if path is not None)
        self._read = read
        self._lock = threading.Lock()
        self._stamps = self._look()
        self._looked_at = time.monotonic()
        self._value = read()

    def get(self) -> T:
        """The value; files are looked at once in `LOOK_INTERVAL_S` at most."""
        if not self._paths:
            return self._value
        with self._lock:
            now = time.monotonic()
            if now - self._looked_at >= LOOK_INTERVAL_S:
                self._looked_at = now
                self._renew()
            return self._value

    def _renew(self) -> None:
        stamps = self._look()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            self._value = self._read()
            log.info("read again: %s", ", ".join(self._paths))
        except ConfigError as error:
            log.error("changed files are not used, the ones before stay: %s", error)

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: str) -> tuple[int, int, int] | None:
    """What changes when the file does; None where there is none."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
