"""Owns a process that the demo started: its command, its reports, and its end. It knows nothing of what it does."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

from pdlink.errors import PdlinkError
from pdlink_engines.reference.demo.spec import DemoSpec

STOP_TIMEOUT_S = 5.0
ENVIRONMENT = {
    # gloo listens on the interface of the host name otherwise, which need not be loopback.
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
}
LOG_TAIL_LINES = 8


class ProcessDied(PdlinkError):
    """A process of the demo that ended before it had finished."""


class DemoProcess:
    """A child that takes the spec and commands on standard input, and reports lines of JSON.

    It runs in a session of its own, so that Ctrl-C reaches the demo alone, which then ends its children in order.
    """

    def __init__(self, name: str, module: str, arguments: list[str], reports: queue.SimpleQueue[Report]) -> None:
        self.name = name
        self._module = module
        self._arguments = arguments
        self._reports = reports
        self._child: subprocess.Popen[str] | None = None
        self._log: Path | None = None
        self.finished = False

    def start(self, spec: DemoSpec) -> None:
        self._log = spec.run_dir / f"{self.name}.log"
        with self._log.open("w", encoding="utf-8") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", self._module, *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={**os.environ, **ENVIRONMENT},
            )
        self.say(spec.model_dump_json())
        assert self._child.stdout is not None
        threading.Thread(target=self._listen, args=(self._child.stdout,), name=f"demo-{self.name}", daemon=True).start()

    def say(self, line: str) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is reported by the listener
            self._child.stdin.write(line + "\n")
            self._child.stdin.flush()

    def log_tail(self) -> str:
        """The last lines of what the process printed, as the end of an error message."""
        if self._log is None:
            return ""
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return ": " + " | ".join(lines[-LOG_TAIL_LINES:]) if lines else ""

    def stop(self) -> None:
        """Close its input, which ends it, and wait; kill it when it does not."""
        if self._child is None:
            return
        if self._child.stdin is not None:
            with contextlib.suppress(OSError):
                self._child.stdin.close()
        try:
            self._child.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _listen(self, out: IO[str]) -> None:
        with out:
            for line in out:
                with contextlib.suppress(ValueError):
                    self._reports.put((self, json.loads(line)))
        assert self._child is not None
        self._reports.put((self, {"event": "exit", "code": self._child.wait()}))


Report = tuple[DemoProcess, dict[str, object]]
