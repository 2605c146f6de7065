"""Owns engines and sidecars as processes that can be killed and started again, for tests of crashes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdlink.testing.child import Child
from tests import processes
from tests.processes import PATIENCE_S, wait_until
from tests.sidecar.rig import REPO, Rig, is_gone

SHM = Path("/dev/shm")


class Engine:
    """A process of `tests.sidecar.engine`."""

    def __init__(self, rig: Rig, path: Path, role: str, fork_until: Path | None = None) -> None:
        self.role = role
        self.child = Child(role, "tests.sidecar.engine", env={"PYTHONPATH": str(REPO), "GRPC_ENABLE_FORK_SUPPORT": "0"})
        rig.stack.callback(self.child.close)
        port, fork = rig.bootstrap.address.port, str(fork_until or "")
        self.child.say({"role": role, "socket": str(path), "port": port, "fork": fork})

    def wait_ready(self) -> None:
        self.serving_pid = int(self.child.hear(PATIENCE_S)["pid"])

    def ask(self, do: str, name: str, pages: Sequence[int] = (), last: bool = False) -> dict[str, Any]:
        answer = self.child.ask(PATIENCE_S, do=do, id=name, pages=list(pages), last=last)
        self.serving_pid = int(answer["pid"])
        return answer

    def wait_served(self) -> int:
        """The process that serves it, once there is one: while it goes from one to the next there is none."""
        assert wait_until(lambda: self.serving_pid > 0 or self.ask("health", "")["pid"])
        return self.serving_pid

    def kill(self) -> None:
        """Without a goodbye, and without anybody removing what it leaves."""
        os.kill(self.child.pid, signal.SIGKILL)
        self.child.wait(PATIENCE_S)

    def remains(self) -> list[str]:
        """What is left of it: its memory, and the process that served it."""
        served = [] if is_gone(self.serving_pid) else [f"process {self.serving_pid}"]
        return served + [path.name for path in SHM.glob(f"pdlink-{self.child.pid}-*")]


class Sidecar:
    """A `pdlink sidecar` process."""

    def __init__(self, rig: Rig, path: Path) -> None:
        self.path = path
        self._rig = rig
        self._stack = rig.stack.enter_context(contextlib.ExitStack())

    def start(self) -> Sidecar:
        options = [f"--set={name}={value}" for name, value in self._rig.settings().items()]
        command = [sys.executable, "-m", "pdlink", "sidecar", "--socket", str(self.path), *options]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "cwd": REPO}
        self.process = self._stack.enter_context(processes.started(command, **pipes))
        assert self.process.stdout.readline() == f"pdlink sidecar listens at {self.path}\n"
        return self

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stdout.read() == "sidecar stops\n"
        assert self.process.wait(PATIENCE_S) == 0

    def has_left_nothing(self) -> bool:
        return not list(self.path.parent.glob(f"{self.path.name}*"))


def wait_gone(engine: Engine, *, sweep: bool = False) -> None:
    """Wait until nothing is left of it; where its death was not the end of its memory's last holder, `sweep` that."""

    def is_gone_at_last() -> bool:
        if sweep:
            processes.sweep()
        return not engine.remains()

    assert wait_until(is_gone_at_last), f"left of the {engine.role} engine: {engine.remains()}"
