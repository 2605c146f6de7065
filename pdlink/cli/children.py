"""Owns child processes that talk in JSON lines: start, say, hear, and end without leaving one. It knows no protocol.

A child ends by itself when its standard input is closed, so none outlives this process, however this process ends.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType

from pdlink.cli.exits import WrongRun
from pdlink.errors import DeadlineExceeded

END_TIMEOUT_S = 10.0
MAX_ERROR_CHARS = 300


class Child:
    """One Python process running a module of ours. `close` twice is fine."""

    def __init__(self, name: str, module: str, arguments: Sequence[str]) -> None:
        self.name = name
        command = [sys.executable, "-m", module, *arguments]
        # A session of its own: Ctrl-C reaches this process alone, which then ends its children in order.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._buffer = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, value: object) -> None:
        """Send one line. Raises `WrongRun` when the child has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def hear(self, timeout_s: float) -> object:
        """The next line. Raises `DeadlineExceeded`, or `WrongRun` when the child has ended."""
        return json.loads(self.hear_text(timeout_s))

    def hear_text(self, timeout_s: float) -> str:
        """The next line as it is."""
        assert self._process.stdout is not None
        give_up = time.monotonic() + timeout_s
        fd = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            left_s = give_up - time.monotonic()
            if left_s <= 0 or not select.select([fd], [], [], left_s)[0]:
                raise DeadlineExceeded(f"{self.name} (process {self.pid}) said nothing for {timeout_s:g} s")
            data = os.read(fd, 1 << 16)
            if not data:
                raise self._ended()
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def close_input(self) -> None:
        """Ask the child to end."""
        if self._process.stdin and not self._process.stdin.closed:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                return

    def close(self) -> None:
        """End the child, by force when it takes longer than `END_TIMEOUT_S`."""
        self.close_input()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ended(self) -> WrongRun:
        code = self._process.wait(END_TIMEOUT_S)
        return WrongRun(f"{self.name} (process {self.pid}) ended with code {code}; see what it wrote above")
