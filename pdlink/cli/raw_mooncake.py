"""Owns the baseline of mooncake: the library driven directly, by batches of reads, by `raw_process.py`. It imports
nothing of pdlink.
"""

from __future__ import annotations

import time
from collections import deque
from importlib import import_module
from typing import Any

HOST = "127.0.0.1"
ATTEMPTS = 3
"""The first read of a connection that has been idle may fail."""
PAUSE_S = 50e-6
DONE, PENDING = 1, 0


def start(memory: Any, option: dict[str, Any]) -> Any:
    """An engine that knows the memory."""
    engine = import_module("mooncake.engine").TransferEngine()
    if engine.initialize(HOST, "P2PHANDSHAKE", option["protocol"], "") != 0:
        raise RuntimeError(f"mooncake does not start over {option['protocol']}")
    if engine.batch_register_memory([memory.address], [memory.nbytes]) != 0:
        raise RuntimeError("mooncake refuses the memory")
    return engine


class Owner:
    """An engine whose memory is read. It has threads of its own."""

    def __init__(self, memory: Any, option: dict[str, Any]) -> None:
        self._memory = memory
        self._engine = start(memory, option)

    def told(self) -> dict[str, Any]:
        return {"session": f"{HOST}:{self._engine.get_rpc_port()}", "address": self._memory.address}

    def drive(self) -> bool:
        return False

    def close(self) -> None:
        self._engine = self._memory = None


class Reader:
    """An engine that reads."""

    def __init__(self, memory: Any, option: dict[str, Any], told: dict[str, Any], source: Any) -> None:
        self._memory = memory
        self._told = told
        self._engine = start(memory, option)
        self._reads: dict[str, tuple[int, list[tuple[list[int], list[int], list[int]]]]] = {}

    def prepare(self, key: str, source: Any, target: Any, nbytes: Any, batch: int, window: int) -> None:
        own, theirs = self._memory.address + target, self._told["address"] + source
        batch = 1 if window else batch
        parts = [slice(first, first + batch) for first in range(0, len(nbytes), batch)]
        lists = [(own[part].tolist(), theirs[part].tolist(), nbytes[part].tolist()) for part in parts]
        self._reads[key] = window, lists

    def read(self, key: str) -> None:
        window, lists = self._reads[key]
        if window:
            self._read_apart(window, lists)
        else:
            self._read_batches(lists)

    def _read_apart(self, window: int, lists: list[tuple[list[int], list[int], list[int]]]) -> None:
        """Each range a read of its own, the oldest looked at without blocking."""
        session, engine = self._told["session"], self._engine
        posted: deque[int] = deque()
        for own, theirs, nbytes in lists:
            if len(posted) >= window:
                self._wait(posted.popleft())
            posted.append(engine.batch_transfer_async_read(session, own, theirs, nbytes))
        while posted:
            self._wait(posted.popleft())

    def _wait(self, posted: int) -> None:
        while (state := self._engine.transfer_check_status(posted)) == PENDING:
            time.sleep(PAUSE_S)
        if state != DONE:
            raise RuntimeError(f"mooncake says {state}")

    def _read_batches(self, lists: list[tuple[list[int], list[int], list[int]]]) -> None:
        session = self._told["session"]
        for own, theirs, nbytes in lists:
            for attempt in range(ATTEMPTS):
                if self._engine.batch_transfer_sync_read(session, own, theirs, nbytes) == 0:
                    break
                if attempt + 1 == ATTEMPTS:
                    raise RuntimeError(f"mooncake could not read {len(own)} ranges")

    def close(self) -> None:
        self._engine = self._memory = None
