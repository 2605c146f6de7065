"""The servers of the reference engine as processes: a front, two prefill ranks, decode; and a rank that is killed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdlink_engines.reference.models import fix_threads, load_model
from pdlink_engines.reference.plain import generate_plain
from tests import ports, processes

MODEL = "glm-dsa-tiny"
PROMPT = "A prompt of more than one page, so that several pages and every layer have to move between two processes."
NUM_TOKENS = 6

# What the rig runs in containers: beside its own tests, for the time it takes.
pytestmark = pytest.mark.rig


class Servers:
    """One bootstrap, two prefill ranks, decode and a front, all on loopback. `log` shows what a server wrote."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        meeting, bootstrap, decode, front, *self._http = (
            f"127.0.0.1:{stack.enter_context(ports.held_port())}" for _ in range(6)
        )
        self.front = f"http://{front}"
        bootstraps = [f"--bootstrap={bootstrap}"]
        model = f"--model={MODEL}"
        self._prefill = [
            ["prefill", f"--rank={rank}", "--cp=2", model, f"--http={http}", f"--leader={meeting}", *bootstraps]
            for rank, http in enumerate(self._http)
        ]
        self._run("bootstrap", [sys.executable, "-m", "pdlink", "bootstrap", "--bind", bootstrap])
        self.ranks = [self.start_rank(rank) for rank in range(2)]
        self._serve("decode", ["decode", model, f"--http={decode}"])
        urls = [f"--prefill-url=http://{self._http[0]}", f"--decode-url=http://{decode}"]
        self._serve(
            "front", ["front", model, f"--http={front}", *urls, *bootstraps, f"--patience={processes.PATIENCE_S}"]
        )

    def start_rank(self, rank: int) -> subprocess.Popen[Any]:
        return self._serve(f"prefill-{rank}", self._prefill[rank])

    def wait_ready(self) -> None:
        assert processes.wait_until(lambda: self._get("/readyz") == 200, processes.PATIENCE_S), self.logs()

    def complete(self) -> dict[str, Any]:
        body = json.dumps({"prompt": PROMPT, "max_tokens": NUM_TOKENS}).encode()
        request = urllib.request.Request(f"{self.front}/v1/completions", data=body)
        try:
            with urllib.request.urlopen(request, timeout=2 * processes.PATIENCE_S) as response:
                found: dict[str, Any] = json.load(response)
                return found
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{error.read().decode()}\n{self.logs()}") from None

    def logs(self) -> str:
        return "\n".join(f"--- {one.name}\n{one.read_text()[-3000:]}" for one in sorted(self._folder.glob("*.log")))

    def metrics(self, rank: int) -> dict[str, float]:
        """What a prefill rank shows: the value of each sample by its name, labels included."""
        with urllib.request.urlopen(f"http://{self._http[rank]}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        return {name: float(value) for name, _, value in (one.rpartition(" ") for one in lines if one[:1] != "#")}

    def _get(self, path: str) -> int:
        try:
            with urllib.request.urlopen(f"{self.front}{path}", timeout=10) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def _serve(self, name: str, arguments: list[str]) -> subprocess.Popen[Any]:
        return self._run(name, [sys.executable, "-m", "pdlink_engines.reference.serve", *arguments])

    def _run(self, name: str, command: list[str]) -> subprocess.Popen[Any]:
        env = os.environ | {
            "GLOO_SOCKET_IFNAME": "lo",
            "PDLINK_BACKENDS": "nixl",
            "PDLINK_LOG": "info",
            "PDLINK_LIVENESS_TIMEOUT_S": "5",
            "UCX_TLS": "tcp,cuda_copy",
        }
        log = self._stack.enter_context((self._folder / f"{name}.log").open("ab"))
        return self._stack.enter_context(processes.started(command, env=env, stdout=log, stderr=log))


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with contextlib.ExitStack() as stack:
        made = Servers(tmp_path, stack)
        made.wait_ready()
        yield made


@pytest.fixture
def expected() -> list[int]:
    fix_threads()
    model = load_model(MODEL)
    return list(generate_plain(model, model.tokenizer.encode(PROMPT), max_new_tokens=NUM_TOKENS).tokens)


def test_servers_answer_what_one_process_answers_and_go_on_after_a_rank_was_killed(
    servers: Servers, expected: list[int]
) -> None:
    found = servers.complete()
    assert found["pdlink"]["tokens"] == expected
    assert sorted(found["pdlink"]["pulled_bytes"]) == ["prefill/dp0.pp0.cp0.tp0", "prefill/dp0.pp0.cp1.tp0"]
    for rank in range(2):
        shown = servers.metrics(rank)
        assert shown["pdlink_layer_reads_total"] >= shown['pdlink_layer_fetch_seconds_count{reader="broadcast"}'] > 0
        assert shown["pdlink_layer_fetch_bytes_total"] > 0
    servers.ranks[1].kill()
    servers.ranks[1].wait(processes.PATIENCE_S)
    servers.start_rank(1)
    # Asked while the ranks are not one group again: the front tries until they are.
    again = servers.complete()
    assert again["pdlink"]["tokens"] == expected
    servers.wait_ready()
