"""Owns the end of a process whose orderly end takes too long, because it waits for somebody who is gone."""

from __future__ import annotations

import logging
import os
import sys
import threading

from pdlink.backends import shm
from pdlink.threads import SupervisedThread

log = logging.getLogger("pdlink_engines.serve")


def end_within(timeout_s: float, code: int) -> threading.Event:
    """End this process with `code` in `timeout_s`, unless the event that is returned was set by then."""
    is_done = threading.Event()

    def watch() -> None:
        if is_done.wait(timeout_s):
            return
        log.error("the orderly end took more than %g s and is cut short", timeout_s)
        shm.close_all()
        sys.stderr.flush()
        os._exit(code)

    SupervisedThread(watch, "serve-watchdog", "server").start()
    return is_done
