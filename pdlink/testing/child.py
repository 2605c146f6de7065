"""Owns child processes that talk in lines: start, say, hear, stop, and end without leaving one. It knows no protocol.

A child ends by itself when its standard input is closed, so none outlives this process, however this process ends. The
child's own side of the conversation is in `parent`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from pdlink.backends import shm
from pdlink.errors import DeadlineExceeded, PdlinkError

END_TIMEOUT_S = 15.0


class ChildEnded(PdlinkError):
    """The process is not there any more; the message has its exit code (negative: the signal that ended it)."""


class Child:
    """One Python process running a module of ours, or a script (a `Path`) of which nothing is importable.

    `env` is set on top of this process's environment. What the child writes to standard error goes where this process's
    does, or into the file `log`. One thread at a time says, and one hears. `close` twice is fine.
    """

    def __init__(
        self,
        name: str,
        program: str | Path,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        *,
        log: Path | None = None,
    ) -> None:
        self.name = name
        self._buffer = b""
        self._is_stopped = False
        what = ["-m", program] if isinstance(program, str) else ["-P", str(program)]
        errors = log.open("wb") if log else None
        try:
            self._process = subprocess.Popen(
                [sys.executable, *what, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **(env or {})},
                # Ctrl-C reaches this process alone, which then ends its children in order.
                start_new_session=True,
            )
        finally:
            if errors:
                errors.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def say(self, value: object) -> None:
        """Send one line of JSON. Raises `ChildEnded`."""
        self.say_text(json.dumps(value))

    def say_text(self, line: str) -> None:
        """Send one line as it is."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def hear(self, timeout_s: float) -> Any:
        """The next line, read as JSON. Raises `DeadlineExceeded` or `ChildEnded`."""
        return json.loads(self.hear_text(timeout_s))

    def hear_text(self, timeout_s: float) -> str:
        """The next line as it is."""
        give_up = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left_s = give_up - time.monotonic()
            if left_s <= 0 or not select.select([self._output], [], [], left_s)[0]:
                raise DeadlineExceeded(f"{self.name} (process {self.pid}) said nothing for {timeout_s:g} s")
            if not self._read():
                raise self._ended()
        return self._line()

    def ask(self, timeout_s: float, **question: Any) -> dict[str, Any]:
        """Say one JSON object and return the answer, another one. Raises as `say` and `hear` do."""
        self.say(question)
        heard: dict[str, Any] = self.hear(timeout_s)
        return heard

    def listen(self) -> Iterator[str]:
        """Every line until the child's output ends, which is when the child does: for a thread that does only this."""
        while True:
            while b"\n" in self._buffer:
                yield self._line()
            if not self._read():
                return

    def stop(self) -> None:
        """Freeze the process, as a host that hangs would. All of its threads stand still when this returns."""
        self._is_stopped = True
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        self._is_stopped = False
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it without a goodbye, stopped or not, and remove the shared memory that it could not."""
        self._process.kill()
        self._process.wait(END_TIMEOUT_S)
        shm.sweep_stale()

    def close_input(self) -> None:
        """Ask the child to end."""
        if self._process.stdin and not self._process.stdin.closed:
            with suppress(BrokenPipeError):  # it has ended; its exit code says how
                self._process.stdin.close()

    def wait(self, timeout_s: float = END_TIMEOUT_S) -> int:
        """The exit code, once the child has ended. Raises `DeadlineExceeded`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(f"{self.name} (process {self.pid}) runs on after {timeout_s:g} s") from None

    def end(self, timeout_s: float = END_TIMEOUT_S) -> int:
        """Ask it to end, by force when it is stopped or takes longer; returns the exit code. Its output stays open."""
        if self._is_stopped:
            self.kill()
        self.close_input()
        try:
            code = self.wait(timeout_s)
        except DeadlineExceeded:
            self.kill()
            code = self.wait()
        if code:
            shm.sweep_stale()
        return code

    def close(self, timeout_s: float = END_TIMEOUT_S) -> int:
        """As `end`, and nothing is heard of it any more."""
        code = self.end(timeout_s)
        if self._process.stdout:
            self._process.stdout.close()
        return code

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def _output(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def _read(self) -> bool:
        """Take what there is, or wait for it; False at the end of the output."""
        data = os.read(self._output, 1 << 16)
        self._buffer += data
        return bool(data)

    def _line(self) -> str:
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def _ended(self) -> ChildEnded:
        return ChildEnded(f"{self.name} (process {self.pid}) ended with code {self.wait()}; see what it wrote above")
