"""Owns the count of strangers that a socket of ours turned away, and the log of them, which they cannot flood."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

from pdlink.events import Events
from pdlink.sparse_log import SparseLog

log = logging.getLogger("pdlink.denials")


class Denials:
    """Counts refusals by reason, tells each as an event, and logs each peer and reason sparsely.

    Thread-safe.
    """

    def __init__(self, event: str, events: Events, clock: Callable[[], float] = time.monotonic) -> None:
        """`event` is the name of what is emitted, with the fields `at`, `peer` and `reason`."""
        self._event = event
        self._events = events
        self._counts: Counter[str] = Counter()
        self._log = SparseLog(log, clock)
        self._lock = threading.Lock()

    @property
    def counts(self) -> Mapping[str, int]:
        """Refusals by reason, since the start."""
        with self._lock:
            return dict(self._counts)

    def add(self, at: str, peer: str, reason: str, text: str = "") -> None:
        """One more, at our socket `at`. `peer` is a host without its port, which is new with every connection."""
        with self._lock:
            self._counts[reason] += 1
        self._log.warn((at, peer, reason), "%s refused %s: %s", at, peer or "a peer", text or reason)
        self._events.emit(self._event, at=at, peer=peer, reason=reason)
