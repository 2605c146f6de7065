"""Owns the baseline of device memory on one host: plain copies from GPU to GPU, one for each range, in one process,
driven by `raw_process.py`. It imports nothing of pdlink.

`option["by"]` is "torch", or "driver": the driver's own call, which has less around it.
"""

from __future__ import annotations

import ctypes
from typing import Any


class Reader:
    """Both memories, and one copy for each range. There is no owner process."""

    def __init__(self, memory: Any, option: dict[str, Any], told: Any, source: Any) -> None:
        import torch

        self._by_driver = option["by"] == "driver"
        self._device = memory.device
        self._target = memory.keep.view(torch.uint8)
        self._source = source.keep.view(torch.uint8)
        self._target[:8].copy_(self._source[:8])  # torch lets the two GPUs reach each other here
        self._rows: dict[str, list[tuple[int, int, int]]] = {}
        self._views: dict[str, list[tuple[Any, Any]]] = {}
        if self._by_driver:
            self._copy = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
            self._copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
            self._copy.restype = ctypes.c_int

    def prepare(self, key: str, source: Any, target: Any, nbytes: Any, batch: int, window: int) -> None:
        rows = list(zip(target.tolist(), source.tolist(), nbytes.tolist(), strict=True))
        if self._by_driver:
            to, at = self._target.data_ptr(), self._source.data_ptr()
            self._rows[key] = [(to + one, at + other, size) for one, other, size in rows]
        else:
            self._views[key] = [
                (self._target[one : one + size], self._source[other : other + size]) for one, other, size in rows
            ]

    def read(self, key: str) -> None:
        import torch

        with torch.cuda.device(self._device):
            if self._by_driver:
                copy, stream = self._copy, torch.cuda.current_stream().cuda_stream
                for target, source, size in self._rows[key]:
                    if code := copy(target, source, size, stream):
                        raise RuntimeError(f"cuMemcpyAsync returned {code}")
            else:
                for to, at in self._views[key]:
                    to.copy_(at, non_blocking=True)
            torch.cuda.synchronize(self._device)
        torch.cuda.synchronize(self._source.device)

    def close(self) -> None:
        self._rows.clear()
        self._views.clear()
        self._target = self._source = None
