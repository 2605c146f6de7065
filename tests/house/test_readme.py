"""What the README shows to run does run."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from pdlink.address import Address
from pdlink.bootstrap.client import BootstrapClient
from pdlink.bootstrap.keeper import RegistrationKeeper
from pdlink.bootstrap.server import BootstrapServer
from pdlink.config import Settings, load_settings
from pdlink.errors import AccessDenied
from tests import processes
from tests.bootstrap.values import PRINT, make_instance
from tests.house.tree import REPO

README = (REPO / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"```(?P<language>\w+)\n(?P<text>.*?)```", re.DOTALL)


def blocks(language: str) -> list[str]:
    return [match["text"] for match in BLOCK.finditer(README) if match["language"] == language]


def test_the_embedding_example_runs_as_it_stands() -> None:
    (example,) = blocks("python")
    ended = processes.run([sys.executable, "-W", "error", "-c", example])
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "b'first token' [1, 5, 6, 10]"


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^make (\w+)", "\n".join(blocks("bash")), re.MULTILINE))))
def test_every_make_target_of_the_readme_exists(command: str) -> None:
    assert re.search(rf"^{command}:", (REPO / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs the openssl command")
def test_the_security_commands_make_what_the_settings_ask_for(tmp_path: Path) -> None:
    (made, used) = (text for text in blocks("bash") if "openssl" in text or "PDLINK_TLS_CA" in text)
    *exports, command = used.strip().splitlines()
    assert command == "pdlink bootstrap --bind 127.0.0.1:7400"
    script = "\n".join([made, *exports, "env -0"])
    path = {"PATH": os.environ["PATH"]}
    run = ["bash", "-euo", "pipefail", "-c", script]
    ended = processes.run(run, cwd=tmp_path, env=path, text=False)
    assert ended.returncode == 0, ended.stderr
    settings = load_settings(dict(one.split("=", 1) for one in ended.stdout.decode().split("\0") if "=" in one))
    assert (tmp_path / "token").stat().st_mode & 0o077 == 0
    first, second = make_instance()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(BootstrapServer.start(Address("127.0.0.1", 0), settings))
        for one in (first, second):
            keeper = stack.enter_context(RegistrationKeeper(one, [server.address], settings))
            keeper.wait_registered(60.0)
        client = stack.enter_context(BootstrapClient([server.address], settings))
        assert len(client.resolve("prefill-a", PRINT).ranks) == 2
        stranger = stack.enter_context(BootstrapClient([server.address], Settings()))
        with pytest.raises(AccessDenied, match="serves TLS"):
            stranger.resolve("prefill-a", PRINT)


def test_every_command_of_the_readme_is_known() -> None:
    table = re.findall(r"^\| `pdlink ([a-z]+(?: [a-z]+)?)", README, re.MULTILINE)
    assert {"demo", "plan", "bootstrap", "bench plan", "bench control"} <= set(table)
    for words in table:
        ended = processes.run([sys.executable, "-m", "pdlink", *words.split(), "--help"])
        assert ended.returncode == 0, ended.stderr
