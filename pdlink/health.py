"""Owns whether a process is well: its parts, and which of them have lost a thread. It ends and restarts nothing.

It listens to events: `thread.died` turns the part that it names red, for as long as the part is there. What may mend
itself (a registration) is asked for with each report.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pdlink.events import Event, Events

MAX_REASONS = 16
"""Of one part. What dies after that changes nothing any more."""


@dataclass(frozen=True, slots=True)
class HealthReport:
    """`parts` maps each part's name to what is wrong with it, or to "". `reasons` are those that make the process
    unwell; a part that does its work only half (one of several bootstraps is away) has a text, and is no reason."""

    ok: bool
    reasons: tuple[str, ...]
    parts: Mapping[str, str]


class Health:
    """The state of every part. Thread-safe; `close` twice is fine."""

    def __init__(self, events: Events) -> None:
        self._lock = threading.Lock()
        self._parts: dict[str, list[str]] = {}
        self._asked: dict[str, Callable[[], tuple[str, bool]]] = {}
        self._unsubscribe = events.subscribe(self._hear)

    def add(self, part: str, ask: Callable[[], tuple[str, bool]] | None = None) -> None:
        """A part is there now. `ask` answers what is wrong with it at the moment, if anything, and whether that makes
        the process unwell."""
        with self._lock:
            self._parts.setdefault(part, [])
            if ask:
                self._asked[part] = ask

    def report(self) -> HealthReport:
        with self._lock:
            heard = {name: list(reasons) for name, reasons in self._parts.items()}
            asked = dict(self._asked)
        unwell = {name for name, reasons in heard.items() if reasons}
        for name, ask in asked.items():
            text, is_unwell = ask()
            heard[name] += [text] if text else []
            unwell |= {name} if is_unwell else set()
        parts = {name: "; ".join(reasons) for name, reasons in heard.items()}
        reasons = tuple(text for name, text in parts.items() if name in unwell)
        return HealthReport(not reasons, reasons, parts)

    def close(self) -> None:
        """Listen no more; `report` still says what was heard."""
        self._unsubscribe()

    def _hear(self, event: Event) -> None:
        if event.name != "thread.died":
            return
        owner, text = str(event.fields.get("owner", "")), str(event.fields.get("text", ""))
        with self._lock:
            reasons = self._parts.setdefault(owner, [])
            if text not in reasons and len(reasons) < MAX_REASONS:
                reasons.append(text)
