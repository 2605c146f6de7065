"""Runs the installed `pdlink` command as a user would, and reads what it printed."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from tests import processes

COMMAND = Path(sys.executable).parent / "pdlink"
TIMEOUT_S = 480


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        return json.loads(self.out.strip().splitlines()[-1])

    @property
    def error_lines(self) -> list[str]:
        """What standard error has besides progress."""
        return [line for line in self.err.splitlines() if line.startswith("error:")]


def run_command(*arguments: str, env: dict[str, str] | None = None) -> Ended:
    ended = processes.run([COMMAND, *arguments], env=env, timeout_s=TIMEOUT_S)
    return Ended(ended.returncode, ended.stdout, ended.stderr)
