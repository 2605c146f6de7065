"""Owns how the pool benches take time: a host's clock on the CPU, a device's own on a GPU. It starts nothing."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

LEAD_CYCLES = 3_000_000
"""Some 1.5 ms of a GPU, in which a host launches any of the reads that are timed."""


class Clock:
    """Seconds between two places of the calling thread, or of the current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._spare = torch.zeros(1, device=device)

    def lead(self) -> None:
        """Let the host be ahead of the GPU, as it is inside a forward: what is timed from here on is launched while the
        GPU still has other work, at whose end the ranks' GPUs meet. Otherwise a read of few tokens is the time in which
        a host that has just slept launches it. Collective; nothing on the CPU."""
        if self._is_cuda:
            torch.cuda._sleep(LEAD_CYCLES)  # type: ignore[no-untyped-call]
            dist.all_reduce(self._spare)

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
