"""Owns the conversation of a test with its child processes: commands and answers as JSON lines, to many at once."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests import processes
from tests.sglang.nursery import Nursery

END_TIMEOUT_S = 20.0


class Failed(AssertionError):
    """A command that a child could not carry out, with its traceback."""


class Child:
    """One process running `module`, forked from the nursery. Its standard error goes to a file, whose end is shown when
    it fails."""

    def __init__(
        self, nursery: Nursery, module: str, log: Path, environ: Mapping[str, str], *arguments: object
    ) -> None:
        self.name = log.stem
        self.log = log
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        with log.open("wb") as file:
            words = [str(one) for one in arguments]
            self._process = nursery.fork(module, words, environ, commands, answers, file.fileno())
        os.close(commands)
        os.close(answers)
        self._heard = os.fdopen(self._answers, "rb")

    def say(self, command: str, **values: Any) -> None:
        try:
            os.write(self._commands, json.dumps({"do": command, **values}).encode() + b"\n")
        except BrokenPipeError:
            raise Failed(f"{self.name} ended:\n{self.tail()}") from None

    def hear(self) -> Any:
        """The answer to the oldest command that has none. The test's own time limit bounds the wait."""
        line = self._heard.readline()
        if not line:
            raise Failed(f"{self.name} ended:\n{self.tail()}")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(f"{self.name}: {answer['error']}\n{self.tail(40)}")
        return answer["value"]

    def do(self, command: str, **values: Any) -> Any:
        self.say(command, **values)
        return self.hear()

    def tail(self, num_lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def kill(self) -> None:
        """End it as a crash would. What it leaves in shared memory is removed, as the next process of pdlink would."""
        self._process.kill()
        processes.sweep()

    def close(self) -> None:
        """End the child: its input closes, and it leaves in order; by force when that takes long. Twice is fine."""
        if self._heard.closed:
            return
        os.close(self._commands)
        if not self._process.wait(END_TIMEOUT_S):
            self.kill()
        self._heard.close()


def ask_all(children: list[Child], command: str, **values: Any) -> list[Any]:
    """The same command to all, whose answers may depend on each other (collectives)."""
    for child in children:
        child.say(command, **values)
    return [child.hear() for child in children]


def serve(commands: Mapping[str, Callable[..., Any]], close: Callable[[], None]) -> None:
    """In a child: carry out commands until the input ends. Nothing else may write to standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        told = json.loads(line)
        command = commands[told.pop("do")]
        try:
            answer = {"value": command(**told)}
        except Exception:  # noqa: BLE001 - a process boundary: the test must learn of anything
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    close()
