"""Owns the path from the core to whoever listens (metrics, traces, logs, tests). It keeps and formats nothing.

The core emits small frozen values; a listener is any callable. A listener that raises is logged once and dropped,
because an observer must never fail a transfer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

log = logging.getLogger("pdlink.events")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. `name` is dotted ("transfer.done"); `fields` are plain values with units in names."""

    name: str
    fields: dict[str, object] = field(default_factory=dict)


Listener = Callable[[Event], None]


class Events:
    """A fan-out of events to listeners. Thread-safe; `emit` never raises."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        self._lock = threading.Lock()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Add a listener and return the call that removes it. It runs on the emitting thread: be quick."""
        with self._lock:
            self._listeners = (*self._listeners, listener)
        return lambda: self._remove(listener)

    def emit(self, name: str, /, **fields: object) -> None:
        """Tell every listener. A field may have any name, `name` included."""
        listeners = self._listeners
        if not listeners:
            return
        event = Event(name, fields)
        for listener in listeners:
            try:
                listener(event)
            except Exception:
                log.exception("event listener %r failed on %s and was removed", listener, name)
                self._remove(listener)

    def _remove(self, listener: Listener) -> None:
        with self._lock:
            self._listeners = tuple(one for one in self._listeners if one is not listener)
