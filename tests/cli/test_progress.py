"""The progress bar: on a terminal only, on standard error only, and never among what a program reads."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

from tests import processes
from tests.processes import PATIENCE_S

ESCAPE = "\x1b["
SMALL = ["bench", "plan", "--pages", "64", "--layers", "2", "--owners", "2"]
SLOWER = {
    "control": ["bench", "control", "--samples", "30", "--cp", "1", "--way", "in-process", "--layers", "1"],
    "transfer": ["bench", "transfer", "--backend", "ipc", "--num-pages", "4", "--layers", "1", "--page-bytes", "64"],
    "digest": ["bench", "digest", "--num-pages", "4", "--layers", "1", "--page-bytes", "4096"],
    "read": ["bench", "read", "--reader", "peer", "--live-tokens", "64", "--pool-tokens", "256", "--rounds", "2"],
    "loop": ["bench", "loop", "--reader", "peer", "--live-tokens", "64", "--pool-tokens", "1024", "--rounds", "2"],
}


def on_terminal(*arguments: str, **environ: str) -> tuple[str, str]:
    """What the command prints, and what it shows on a terminal that is its standard error alone."""
    ours, theirs = pty.openpty()
    shown: list[bytes] = []
    env = {**os.environ, "TERM": "xterm", **environ}
    command = [sys.executable, "-m", "pdlink", *arguments]
    with processes.started(command, stdout=subprocess.PIPE, stderr=theirs, text=True, env=env) as process:
        os.close(theirs)
        try:
            while data := os.read(ours, 1 << 16):
                shown.append(data)
        except OSError:  # how a terminal says that nobody has it open any more
            pass
        printed = process.stdout.read()
        assert process.wait(PATIENCE_S) == 0, b"".join(shown).decode()
    os.close(ours)
    return printed, b"".join(shown).decode()


def test_a_terminal_shows_a_bar_and_json_has_nothing_of_it() -> None:
    printed, shown = on_terminal(*SMALL, "--json")
    assert len(printed.splitlines()) == 1
    assert json.loads(printed)["num_pages"] == 64
    assert "plans" in shown
    assert ESCAPE in shown
    assert "of 8" in shown


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_that_cannot_draw_shows_none(term: str) -> None:
    assert on_terminal(*SMALL, "--json", TERM=term)[1] == ""


def test_a_pipe_gets_none() -> None:
    done = processes.run([sys.executable, "-m", "pdlink", *SMALL], check=True, env={**os.environ, "TERM": "xterm"})
    assert done.stderr == ""
    assert ESCAPE not in done.stdout


@pytest.mark.slow
@pytest.mark.backend("ipc")
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(words, id=name, marks=[] if name in ("control", "loop") else pytest.mark.thorough)
        for name, words in SLOWER.items()
    ],
)
def test_every_bench_shows_how_far_it_is(arguments: list[str]) -> None:
    printed, shown = on_terminal(*arguments, "--json")
    assert json.loads(printed)
    assert ESCAPE in shown
    assert " of " in shown
