"""Owns the question whether a process of this host that one has met is still there. It waits for nothing.

A process shows a few facts of itself, and others look for it by them. Of a process on another host nothing is known.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

_EXITING = 0x4
"""PF_EXITING of Linux: set before the process's files and sockets close, so whoever sees them close sees this too."""
_DEAD_STATES = "ZX"


def own_presence() -> bytes:
    """Facts of this process that tell it apart from every other, at any time: host, number and start."""
    pid = os.getpid()
    state = _look(pid)
    return json.dumps([_host(), pid, state[2] if state else 0]).encode()


def has_ended(presence: bytes) -> bool:
    """Whether that process is no more, or is ending. False for one of another host, of which this one cannot know."""
    host, pid, started = json.loads(presence)
    if host != _host() or not host:
        return False
    state = _look(int(pid))
    return state is None or state[0] in _DEAD_STATES or bool(state[1] & _EXITING) or state[2] != started


@cache
def _host() -> str:
    """Of processes that see each other's numbers; empty where Linux does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _look(pid: int) -> tuple[str, int, int] | None:
    """State, flags and start of a process; None where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field, a name in parentheses, may hold anything.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[6]), int(fields[19])
