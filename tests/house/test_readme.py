"""What the README shows to run does run."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.house.tree import REPO

README = (REPO / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"```(?P<language>\w+)\n(?P<text>.*?)```", re.DOTALL)


def blocks(language: str) -> list[str]:
    return [match["text"] for match in BLOCK.finditer(README) if match["language"] == language]


def test_the_embedding_example_runs_as_it_stands() -> None:
    (example,) = blocks("python")
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", example], capture_output=True, text=True, timeout=50, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "b'first token' [1, 5, 6, 10]"


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^make (\w+)", "\n".join(blocks("bash")), re.MULTILINE))))
def test_every_make_target_of_the_readme_exists(command: str) -> None:
    assert re.search(rf"^{command}:", (REPO / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_every_command_of_the_readme_is_known() -> None:
    table = re.findall(r"^\| `pdlink ([a-z]+(?: [a-z]+)?)", README, re.MULTILINE)
    assert {"demo", "plan", "bootstrap", "bench plan", "bench control"} <= set(table)
    for words in table:
        ended = subprocess.run(
            [sys.executable, "-m", "pdlink", *words.split(), "--help"], capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr
