"""Owns how a process of a fault test begins: in its host's network namespace, and with a wall clock that can jump.

    python -m tests.faults.launch HOLDER MODULE ARGUMENTS...

HOLDER is the process that keeps the namespace (0: stay here). It ends when its parent does, even killed. SIGUSR1 and
SIGUSR2 put the wall clock, as Python sees it, a day ahead and a day back.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import time
import types
from collections.abc import Callable
from importlib import import_module

DAY_S = 86_400
KEEPS_KERNELS_TIME = ("grpc._channel", "grpc._common", "grpc._server", "grpc._utilities", "grpc.aio._utils")
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1


def main(holder: str, module: str, *arguments: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if int(holder):
        with open(f"/proc/{holder}/ns/net", "rb") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace of process {holder}")
    make_clock_jump()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def make_clock_jump() -> None:
    """Replace the wall clock of `time` by one that two signals move.

    gRPC keeps the kernel's: its Python half reckons deadlines for its C half, and a real jump would move both.
    """
    kernels = types.ModuleType("time")
    kernels.__dict__.update(time.__dict__)
    for name in KEEPS_KERNELS_TIME:
        import_module(name).time = kernels  # type: ignore[attr-defined]
    ahead_s = 0

    def move(by_s: int) -> Callable[[int, object], None]:
        def handler(signum: int, frame: object) -> None:
            nonlocal ahead_s
            ahead_s += by_s

        return handler

    now, now_ns = time.time, time.time_ns
    ahead_s = int(os.environ.get("FAULTS_CLOCK_AHEAD_S", "0"))
    time.time = lambda: now() + ahead_s
    time.time_ns = lambda: now_ns() + ahead_s * 10**9
    signal.signal(signal.SIGUSR1, move(DAY_S))
    signal.signal(signal.SIGUSR2, move(-DAY_S))


if __name__ == "__main__":
    main(*sys.argv[1:])
