"""Owns a process that the demo started: its reports, its log, and its end. It knows nothing of what it does."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from pathlib import Path

from pdlink.errors import PdlinkError
from pdlink.testing.child import Child, ChildEnded
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
    """A child that takes the spec and commands on standard input, and reports lines of JSON."""

    def __init__(self, name: str, module: str, arguments: list[str], reports: queue.SimpleQueue[Report]) -> None:
        self.name = name
        self._module = module
        self._arguments = arguments
        self._reports = reports
        self._child: Child | None = None
        self._log: Path | None = None

    def start(self, spec: DemoSpec) -> None:
        self._log = spec.run_dir / f"{self.name}.log"
        self._child = Child(self.name, self._module, self._arguments, ENVIRONMENT, log=self._log)
        self.say(spec.model_dump_json())
        threading.Thread(target=self._listen, args=(self._child,), name=f"demo-{self.name}", daemon=True).start()

    def say(self, line: str) -> None:
        assert self._child is not None
        with contextlib.suppress(ChildEnded):  # its end is reported by the listener
            self._child.say_text(line)

    def log_tail(self) -> str:
        """The last lines of what the process printed, as the end of an error message."""
        if self._log is None:
            return ""
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return ": " + " | ".join(lines[-LOG_TAIL_LINES:]) if lines else ""

    def stop(self) -> None:
        """End it, by force when it takes long."""
        if self._child is not None:
            self._child.end(STOP_TIMEOUT_S)

    def _listen(self, child: Child) -> None:
        for line in child.listen():
            with contextlib.suppress(ValueError):
                self._reports.put((self, json.loads(line)))
        self._reports.put((self, {"event": "exit", "code": child.close()}))


Report = tuple[DemoProcess, dict[str, object]]
