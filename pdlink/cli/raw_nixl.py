"""Owns the baseline of nixl: the library driven directly, with prepared descriptor lists, by `raw_process.py`.

It imports nothing of pdlink.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import time
from base64 import b64decode, b64encode
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np

IN_FLIGHT = 2
"""Posts under way, where a read is posted in several.

`option` says whether agents have a progress thread, and how long both sides pause (`pause_s`) between two looks.
"""


def start(memory: Any, option: dict[str, Any]) -> tuple[Any, str]:
    """An agent that knows the memory, and nixl's name for the kind of memory."""
    with suppress(OSError):  # the system's own copy first: else the two that UCX loads get into each other's way
        ctypes.CDLL("libibverbs.so.1")
    api = None
    for name in ("nixl", "nixl_cu12", "nixl_cu13"):
        with suppress(ModuleNotFoundError):
            api = import_module(f"{name}._api")
            break
    if api is None:
        raise RuntimeError("nixl is not installed")
    config = api.nixl_agent_config(enable_prog_thread=bool(option["progress_thread"]), backends=["UCX"])
    agent = api.nixl_agent(f"raw-{os.getpid()}-{secrets.token_hex(4)}", config)
    kind = "DRAM" if memory.device < 0 else "VRAM"
    agent.register_memory([(memory.address, memory.nbytes, max(0, memory.device), "")], kind)
    return agent, kind


class Owner:
    """An agent whose memory is read. Without a progress thread it is driven by `drive`."""

    def __init__(self, memory: Any, option: dict[str, Any]) -> None:
        self._memory = memory
        self._has_thread = bool(option["progress_thread"])
        self._pause_s = float(option["pause_s"])
        self._agent, self._kind = start(memory, option)

    def told(self) -> dict[str, Any]:
        return {
            "metadata": b64encode(self._agent.get_agent_metadata()).decode(),
            "address": self._memory.address,
            "device": max(0, self._memory.device),
            "kind": self._kind,
        }

    def drive(self) -> bool:
        if self._has_thread:
            return False
        self._agent.get_new_notifs()
        if self._pause_s:
            time.sleep(self._pause_s)
        return True

    def close(self) -> None:
        self._agent = self._memory = None


class Reader:
    """An agent that reads."""

    def __init__(self, memory: Any, option: dict[str, Any], told: dict[str, Any], source: Any) -> None:
        self._memory = memory
        self._told = told
        self._pause_s = float(option["pause_s"])
        self._agent, self._kind = start(memory, option)
        name = self._agent.add_remote_agent(b64decode(told["metadata"]))
        self._peer = name.decode() if isinstance(name, bytes) else str(name)
        self._reads: dict[str, tuple[Any, Any, list[Any]]] = {}

    def prepare(self, key: str, source: Any, target: Any, nbytes: Any, batch: int, window: int) -> None:
        own = rows(self._memory.address + target, nbytes, max(0, self._memory.device))
        theirs = rows(self._told["address"] + source, nbytes, self._told["device"])
        lists = (
            self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", own, self._kind),
            self._agent.prep_xfer_dlist(self._peer, theirs, self._told["kind"]),
        )
        every = np.arange(len(nbytes), dtype=np.int32)
        self._reads[key] = (*lists, [every[first : first + batch] for first in range(0, len(every), batch)])

    def read(self, key: str) -> None:
        own, theirs, parts = self._reads[key]
        agent, posted = self._agent, []
        for part in parts:
            handle = agent.make_prepped_xfer("READ", own, part, theirs, part)
            if agent.transfer(handle) == "DONE":
                handle.release()
                continue
            posted.append(handle)
            if len(posted) >= IN_FLIGHT:
                self._wait(posted.pop(0))
        for handle in posted:
            self._wait(handle)

    def _wait(self, handle: Any) -> None:
        while (state := self._agent.check_xfer_state(handle)) != "DONE":
            if state != "PROC":
                raise RuntimeError(f"nixl says {state}")
            if self._pause_s:
                time.sleep(self._pause_s)
        handle.release()

    def close(self) -> None:
        for own, theirs, _ in self._reads.values():
            own.release()
            theirs.release()
        self._reads.clear()
        self._agent = self._memory = None


def rows(address: Any, nbytes: Any, device: int) -> Any:
    """uint64 [n, 3] of (address, nbytes, device)."""
    return np.stack([address, nbytes, np.full_like(address, device)], axis=1).astype(np.uint64)
