"""Owns how prefill ranks that do not fit are told so, over channels that live for a moment. It decides nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial

from pdlink.bootstrap.messages import Endpoint
from pdlink.config import Settings
from pdlink.control.frames import Frame
from pdlink.control.loop import Channel, ControlLoop
from pdlink.errors import StateError

log = logging.getLogger("pdlink.decode")


class Teller:
    """Thread-safe, under the lock of its worker. Requests that come meanwhile share a rank's channel."""

    def __init__(self, settings: Settings, loop: ControlLoop, lock: threading.RLock) -> None:
        self._settings = settings
        self._loop = loop
        self._lock = lock
        self._channels: dict[Endpoint, Channel] = {}

    def tell(self, endpoint: Endpoint, frames: Sequence[Frame]) -> None:
        """Send `frames`. Past `max_peers` channels nothing is sent: a rank that is not told lets go of its request by
        itself, when nobody reads it."""
        with self._lock:
            channel = self._channels.get(endpoint)
            if channel is None and len(self._channels) < self._settings.max_peers:
                try:
                    channel = self._loop.connect(endpoint.control_endpoint, lambda frame: None, endpoint.control_keys)
                except StateError as error:
                    log.warning("%s is not told that it does not fit: %s", endpoint.worker_id, error)
                    return
                self._channels[endpoint] = channel
                self._loop.call_later(self._settings.confirm_timeout_s, partial(self._end, endpoint))
            if channel:
                channel.send(*frames)

    def _end(self, endpoint: Endpoint) -> None:
        with self._lock:
            self._channels.pop(endpoint).close()
