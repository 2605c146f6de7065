"""Owns a ring of events that another process looks at: made once, recorded again and again, in turn.

An event is recorded behind what an engine has recorded, on a stream of its own, so that nothing here ever runs on an
engine's stream and one event waits for no other.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from typing import Any

from pdlink.backends.cuda_driver import HANDLE_BYTES, call, constant, is_over, on_device
from pdlink.backends.cuda_stream import Stream


@dataclass(slots=True, eq=False)
class _Slot:
    event: Any
    stream: Stream
    is_recorded: bool = False


class EventRing:
    """`num_events` events of one device. Thread-safe; `close` twice is fine, and waits for what they wait for.

    A slot is recorded anew only when its last record is over. Whoever looks at that one after it then waits for the
    newer record, too, which is late but not wrong.
    """

    def __init__(self, device: int, num_events: int) -> None:
        self.device = device
        self._slots: list[_Slot] = []
        self._next = 0
        self._lock = threading.Lock()
        flags = constant("CUevent_flags", "CU_EVENT_DISABLE_TIMING").value
        flags |= constant("CUevent_flags", "CU_EVENT_INTERPROCESS").value
        with on_device(device):
            for _ in range(num_events):
                self._slots.append(_Slot(call("cuEventCreate", flags), Stream(device)))
            made = [call("cuIpcGetEventHandle", one.event) for one in self._slots]
        self.handles = tuple(ctypes.string_at(one.getPtr(), HANDLE_BYTES) for one in made)
        """By which another process opens them, in order."""

    def record_behind(self, event: int) -> int | None:
        """Record the next event behind the work before `event`, the driver's number of one that an engine recorded.

        Returns its slot; None where that of the next one is not over. Never blocks. Raises `BackendError`.
        """
        with self._lock, on_device(self.device):
            if not self._slots:
                return None
            number = self._next
            slot = self._slots[number]
            if slot.is_recorded and not is_over(slot.event, self.device):
                return None
            call("cuStreamWaitEvent", slot.stream.handle, event, 0)
            call("cuEventRecord", slot.event, slot.stream.handle)
            slot.is_recorded = True
            self._next = (number + 1) % len(self._slots)
            return number

    def close(self) -> None:
        with self._lock:
            slots, self._slots = self._slots, []
        for one in slots:
            one.stream.close()
            with on_device(self.device):
                call("cuEventDestroy", one.event)
