"""Owns the life of an engine's process: a parent that holds the loaded weights, and a child that serves. It knows no
request.

Ranks that compute together are of no use once one of them is gone: collectives of torch cannot go on with another
process in its place. A child that finds this ends, and the next one is forked from the parent in milliseconds, with
nothing left of the old group in it, while loading the weights again would take many seconds.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from pdlink.backends import shm

log = logging.getLogger("pdlink_engines.serve")

AGAIN = 75
"""The exit code of a child that wants to be started anew (EX_TEMPFAIL of sysexits.h)."""
PAUSE_S = 0.1
_PR_SET_PDEATHSIG = 1


def keep(serve: Callable[[], int]) -> int:
    """Run `serve` in forked children, a new one whenever it returns `AGAIN`; returns the exit code of the last.

    SIGTERM and SIGINT go to the child, which is not replaced then. The caller has one thread and no open group, link or
    socket: a child has a copy of all it has.
    """
    stopping = False
    child = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        if child:
            _send(child, signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    parent = os.getpid()
    while True:
        child = os.fork()
        if child == 0:
            _run_child(serve, parent)
        if stopping:  # the signal came before the child was known
            _send(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        child = 0
        if stopping or code != AGAIN:
            return code if code >= 0 else 128 - code
        time.sleep(PAUSE_S)


def _run_child(serve: Callable[[], int], parent: int) -> None:
    """Never returns. Threads that wait in a collective cannot hold up the end."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent passes it on
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # A parent that was killed must not leave a server behind.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            code = serve()
    except BaseException:
        log.exception("the server ends by an error")
    finally:
        shm.close_all()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _send(child: int, number: int) -> None:
    try:
        os.kill(child, number)
    except ProcessLookupError:
        return
