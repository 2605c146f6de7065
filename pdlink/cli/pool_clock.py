"""Owns how the pool benches take time: a host's clock on the CPU, a device's own on a GPU. It starts nothing."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Seconds between two places of the calling thread, or of the current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        place: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        place.record()
        return place

    def since(self, start: Any) -> float:
        """On a GPU this waits for the stream to come here."""
        here = self.now()
        if not self._is_cuda:
            return float(here - start)
        here.synchronize()
        return float(start.elapsed_time(here)) / 1e3
