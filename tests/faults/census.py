"""Owns what a process holds, counted: threads, file descriptors, shared memory, regions. It judges nothing."""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from pathlib import Path

from pdlink.backends.base import Backend
from pdlink.runtime.node import Node

_NUMBER = re.compile(r"[-_]?[0-9]+([.:][0-9]+)*")
GRPC_THREADS = ("event_engine", "grpc_global_tim", "lifeguard", "default-execut", "resolver-execut", "grpc_shutdown")
"""As the kernel names them. gRPC starts and ends these as it likes, in a pool of its own."""


def take(node: Node) -> dict[str, object]:
    """`threads` are Python's by name, `natives` how many others the kernel has but those of gRPC's pool; `regions` what
    the backends say they serve."""
    threads = Counter(_NUMBER.sub("", one.name) for one in threading.enumerate())
    files = open_files()
    return {
        "threads": dict(sorted(threads.items())),
        "natives": num_tasks() - sum(threads.values()),
        "fds": sum(files.values()),
        "fd_kinds": dict(sorted(files.items())),
        "segments": len(mapped_segments()),
        "regions": {name: num_regions(backend) for name, backend in node.backends.items()},
        "free_slots": sum(one.slots.num_free for one in node._arenas.values() if one),
    }


def num_tasks() -> int:
    """The threads of this process as the kernel counts them, without those of gRPC's pool."""
    found = 0
    for path in Path("/proc/self/task").iterdir():
        try:
            found += not (path / "comm").read_text(encoding="utf-8").startswith(GRPC_THREADS)
        except OSError:  # it has ended meanwhile
            continue
    return found


def open_files() -> Counter[str]:
    """Kind -> how many this process has open."""
    kinds: Counter[str] = Counter()
    for path in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(path)
        except OSError:  # the one that lists this folder
            continue
        kinds[target.partition(":[")[0] if ":[" in target else ("shm" if "/dev/shm/" in target else target)] += 1
    del kinds[f"/proc/{os.getpid()}/fd"]
    return kinds


def mapped_segments() -> set[str]:
    """The shared-memory segments of pdlink that this process maps."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return {line.split(None, 5)[5] for line in lines if "/dev/shm/pdlink" in line}


def num_regions(backend: Backend) -> int:
    """How many regions a backend counts as registered, each as often as it was."""
    counted = getattr(backend, "_regions", None)
    if counted is None:
        counted = backend._spans._counts  # type: ignore[attr-defined]
    return sum(counted.values())
