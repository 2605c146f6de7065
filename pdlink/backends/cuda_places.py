"""Owns the events by which streams of one device wait for each other: made once, and used again. It launches no work.

A read of few tokens takes some tens of microseconds, of which the host has its part: these calls go straight to the
driver, and need no current context.
"""

from __future__ import annotations

from typing import Any

from pdlink.backends.cuda_driver import bindings, call, constant, is_over, on_device
from pdlink.errors import BackendError


class Place:
    """A place in a stream: behind everything that was on it when this was made. Its event is used again afterwards."""

    __slots__ = ("_events", "event")

    def __init__(self, events: Events, event: Any) -> None:
        self._events, self.event = events, event

    def __del__(self) -> None:
        self._events.take_back(self.event)


class Events:
    """Events of one device. One thread records and waits; `close` twice is fine. Streams are given as addresses."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._driver = bindings()
        self._ok = self._driver.CUresult.CUDA_SUCCESS
        self._spare: list[Any] = []
        self._is_closed = False

    def place(self, stream: int) -> Place:
        """The place behind what is on the stream now."""
        place = Place(self, self._spare.pop() if self._spare else self._make())
        (code,) = self._driver.cuEventRecord(place.event, stream)
        if code != self._ok:
            raise BackendError(f"device {self._device}: cuEventRecord failed: {code}")
        return place

    def wait(self, stream: int, place: Place) -> None:
        """What is put on the stream from here on runs after the place."""
        (code,) = self._driver.cuStreamWaitEvent(stream, place.event, 0)
        if code != self._ok:
            raise BackendError(f"device {self._device}: cuStreamWaitEvent failed: {code}")

    def is_over(self, place: Place) -> bool:
        """Whether the work before the place is done. Raises `BackendError` when the device has failed."""
        return is_over(place.event, self._device)

    def take_back(self, event: Any) -> None:
        """An event that no place uses any more: streams that were to wait for it have been told already."""
        if self._is_closed:
            self._destroy([event])
        else:
            self._spare.append(event)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            spare, self._spare = self._spare, []
            self._destroy(spare)

    def _make(self) -> Any:
        with on_device(self._device):
            return call("cuEventCreate", constant("CUevent_flags", "CU_EVENT_DISABLE_TIMING").value)

    def _destroy(self, events: list[Any]) -> None:
        for event in events:
            self._driver.cuEventDestroy(event)
