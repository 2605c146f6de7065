"""Owns one Python process of the conformance suite that is talked to in JSON lines. It knows no scenario.

A child ends by itself when its standard input is closed, so none outlives this process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pdlink.backends import shm
from pdlink.errors import DeadlineExceeded, PdlinkError

END_TIMEOUT_S = 15.0


class ChildEnded(PdlinkError):
    """The process is not there any more; the message has its exit code (negative: the signal that ended it)."""


class Child:
    """`python -m module arguments...` with `env` on top of this process's environment. `close` twice is fine."""

    def __init__(self, name: str, module: str, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        self.name = name
        self._buffer = b""
        self._is_stopped = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **env},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, timeout_s: float, **question: Any) -> dict[str, Any]:
        """Say one line and return the answer. Raises `ChildEnded` or `DeadlineExceeded`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._ended() from error
        return self.hear(timeout_s)

    def hear(self, timeout_s: float) -> dict[str, Any]:
        """The next line. Raises `ChildEnded` or `DeadlineExceeded`."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        give_up = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left_s = give_up - time.monotonic()
            if left_s <= 0 or not select.select([fd], [], [], left_s)[0]:
                raise DeadlineExceeded(f"{self.name} (process {self.pid}) said nothing for {timeout_s:g} s")
            data = os.read(fd, 1 << 16)
            if not data:
                raise self._ended()
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def stop(self) -> None:
        """Freeze the process, as a host that hangs would."""
        self._is_stopped = True
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        self._is_stopped = False
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it without a goodbye, stopped or not, and remove the shared memory that it could not."""
        self._process.kill()
        self._process.wait(END_TIMEOUT_S)
        shm.sweep_stale()

    def close(self) -> int:
        """Ask it to end, by force when it is stopped or takes `END_TIMEOUT_S`; returns the exit code."""
        if self._is_stopped:
            self.kill()
        if self._process.stdin and not self._process.stdin.closed:
            with suppress(BrokenPipeError):  # it has ended; its exit code says how
                self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        if self._process.stdout:
            self._process.stdout.close()
        if self._process.returncode:
            shm.sweep_stale()
        return self._process.returncode

    def _ended(self) -> ChildEnded:
        code = self._process.wait(END_TIMEOUT_S)
        return ChildEnded(f"{self.name} (process {self.pid}) ended with code {code}; see what it wrote above")


def say(**answer: Any) -> None:
    """In a child: one line to whoever started it."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def own_stdout() -> None:
    """In a child: keep what libraries print out of the conversation, by sending it to standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = out
