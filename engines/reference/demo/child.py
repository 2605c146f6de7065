"""Owns a demo process's side of the pipe to the demo that started it: reports out, commands in.

The process ends when its parent does, whatever it is doing then: its standard input is closed, its shared memory is
removed, and it exits.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pdlink.backends import shm
from pdlink.errors import DeadlineExceeded, PdlinkError
from pdlink.testing.parent import Parent
from pdlink_engines.reference.demo.spec import DemoSpec

COMMAND_TIMEOUT_S = 600.0


class ParentPipe:
    """Reports go to the standard output that the process was started with; prints of libraries go to standard error."""

    def __init__(self) -> None:
        self._parent = Parent()
        self._commands: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._has_failed = False
        self.spec = DemoSpec.model_validate_json(sys.stdin.readline())
        threading.Thread(target=self._listen, name="demo-parent", daemon=True).start()

    def report(self, event: str, **fields: object) -> None:
        self._parent.say({"event": event, **fields})

    def report_error(self, error: Exception) -> None:
        """The first one; what comes after it follows from it."""
        if self._has_failed:
            return
        self._has_failed = True
        kind, text = type(error).__name__, str(error)
        known = isinstance(error, PdlinkError)
        self.report("error", kind=kind if known else "", text=text if known else f"{kind}: {text}")

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Report what goes wrong within before anything around this is closed: others fail by that, and would say so
        sooner."""
        try:
            yield
        except Exception as error:
            self.report_error(error)
            raise

    def wait_for(self, command: str) -> None:
        """Block until the parent sends `command`. Raises `DeadlineExceeded`."""
        try:
            said = self._commands.get(timeout=COMMAND_TIMEOUT_S)
        except queue.Empty:
            raise DeadlineExceeded(f"the demo did not say {command!r} within {COMMAND_TIMEOUT_S:g} s") from None
        assert said == command, f"expected {command!r}, the demo said {said!r}"

    def _listen(self) -> None:
        for line in sys.stdin:
            self._commands.put(line.strip())
        leave(1)


def leave(code: int) -> None:
    """End this process at once, leaving no shared memory. Threads that wait in a collective cannot hold it up."""
    shm.close_all()
    sys.stderr.flush()
    os._exit(code)


def run_child(body: Callable[[ParentPipe], None]) -> None:
    """Run a process of the demo: an error becomes one report, and the exit is quick and clean."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and closes the pipe
    signal.signal(signal.SIGTERM, lambda number, frame: leave(1))
    pipe = ParentPipe()
    try:
        body(pipe)
    except PdlinkError as error:
        pipe.report_error(error)
        leave(2)
    except Exception as error:  # the parent must learn why its process ends
        pipe.report_error(error)
        raise
    leave(0)
