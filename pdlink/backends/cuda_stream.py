"""Owns a stream of pdlink's own on one device, and the marks by which the end of work on it is known.

Nothing of pdlink ever runs on an engine's stream: this one waits for none, not even for the default stream, so work on
it ends while an engine's stream is blocked.
"""

from __future__ import annotations

import threading
from typing import Any

from pdlink.backends.cuda_driver import call, constant, is_over, on_device
from pdlink.errors import BackendError


class Mark:
    """A place in a stream. The work before it is over once `is_over` says so; `wait` tells whether it went well."""

    def __init__(self, stream: Stream, event: Any) -> None:
        self._stream = stream
        self._event = event
        self._is_over = False
        self._error: BackendError | None = None

    @property
    def is_over(self) -> bool:
        """Whether the work has ended. It has too when the device has failed: its context is lost, with all that ran."""
        if not self._is_over:
            try:
                self._is_over = self._stream.reached(self._event)
            except BackendError as error:
                self._error, self._is_over = error, True
        return self._is_over

    def wait(self) -> None:
        """Return once it is over. Raises `BackendError` when the device has failed."""
        if not self.is_over:
            # Copies end within a millisecond or so: a thread that waits here without the GIL is in nobody's way.
            try:
                self._stream.wait_for(self._event)
            except BackendError as error:
                self._error = error
            self._is_over = True
        if self._error:
            raise self._error

    def __del__(self) -> None:
        self._stream.take_back(self._event)


class Stream:
    """One stream of a device. Thread-safe; `close` twice is fine, and waits for what is on it."""

    def __init__(self, device: int) -> None:
        self.device = device
        with on_device(device):
            _, greatest = call("cuCtxGetStreamPriorityRange")
            flag = constant("CUstream_flags", "CU_STREAM_NON_BLOCKING")
            self.handle = call("cuStreamCreateWithPriority", flag.value, greatest)
        self._spare: list[Any] = []
        self._lock = threading.RLock()  # a mark may be collected while this thread holds it
        self._closed = False

    def mark(self) -> Mark:
        """A mark behind everything that is on the stream now."""
        with on_device(self.device):
            with self._lock:
                event = self._spare.pop() if self._spare else None
            if event is None:
                event = call("cuEventCreate", constant("CUevent_flags", "CU_EVENT_DISABLE_TIMING").value)
            call("cuEventRecord", event, self.handle)
        return Mark(self, event)

    def reached(self, event: Any) -> bool:
        return is_over(event, self.device)

    def wait_for(self, event: Any) -> None:
        """Return once the work before `event` is over. Raises `BackendError` when the device has failed."""
        call("cuEventSynchronize", event)

    def take_back(self, event: Any) -> None:
        """An event that no mark uses any more. It may be recorded again while its last record is pending."""
        with self._lock:
            self._spare.append(event)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            spare, self._spare = self._spare, []
        with on_device(self.device):
            call("cuStreamSynchronize", self.handle)
            for event in spare:
                call("cuEventDestroy", event)
            call("cuStreamDestroy", self.handle)
