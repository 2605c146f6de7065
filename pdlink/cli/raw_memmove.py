"""Owns the baseline of host memory on one host: plain copies between two shared mappings by one thread, driven by
`raw_process.py`. It imports nothing of pdlink.
"""

from __future__ import annotations

import ctypes
from typing import Any


class Reader:
    """Both memories, and a loop of memmove. There is no owner process."""

    def __init__(self, memory: Any, option: dict[str, Any], told: Any, source: Any) -> None:
        self._target = memory.address
        self._source = source.address
        self._rows: dict[str, list[tuple[int, int, int]]] = {}

    def prepare(self, key: str, source: Any, target: Any, nbytes: Any, batch: int, window: int) -> None:
        columns = ((self._target + target).tolist(), (self._source + source).tolist(), nbytes.tolist())
        self._rows[key] = list(zip(*columns, strict=True))

    def read(self, key: str) -> None:
        memmove = ctypes.memmove
        for target, source, nbytes in self._rows[key]:
            memmove(target, source, nbytes)

    def close(self) -> None:
        self._rows.clear()
