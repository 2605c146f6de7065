"""Owns real sglang servers on CPU with a tiny model: their commands, processes, requests and end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import processes
from tests.sglang.nursery import REPO

HOST = "127.0.0.1"
HERE = Path(__file__).parent
MODEL = HERE / "models" / "tiny-llama"
# What makes sglang run without a GPU, and a prompt of more than 64 tokens come in chunks.
ON_CPU = """--load-format dummy --skip-tokenizer-init --device cpu --attention-backend torch_native --dtype float32
    --sampling-backend pytorch --disable-overlap-schedule --disable-cuda-graph --skip-server-warmup
    --max-total-tokens 4096 --max-running-requests 16 --context-length 1024 --mem-fraction-static 0.3
    --page-size 16 --chunked-prefill-size 64 --random-seed 7"""
READY_TIMEOUT_S = 240.0
ANSWER_TIMEOUT_S = 120.0


def readme_commands() -> dict[str, list[str]]:
    """Role -> the words of its launch command in the plug-in's README, after `python`."""
    text = (REPO / "engines" / "sglang" / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^python (-m sglang\.launch_server .*)$", text, re.MULTILINE)
    commands = [shlex.split(line) for line in lines]
    return {words[words.index("--disaggregation-mode") + 1]: words for words in commands}


def with_values(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The command with other values for the options that it has."""
    changed = list(words)
    for option, value in values.items():
        changed[changed.index(option) + 1] = value
    return changed


class Server:
    """One server, with the processes that it starts. `close` twice is fine."""

    def __init__(self, name: str, words: Sequence[str], port: int, log: Path, environ: Mapping[str, str]) -> None:
        self.name, self.port, self.log = name, port, log
        self._end = contextlib.ExitStack()
        with log.open("wb") as file:
            self._process = self._end.enter_context(
                processes.started(
                    [sys.executable, "-W", "ignore", *words, *ON_CPU.split()],
                    cwd=log.parent,
                    env={**os.environ, "PYTHONPATH": str(HERE / "stubs"), **environ},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                    wind_down_s=None,
                )
            )

    def wait_ready(self) -> None:
        """Raises with the end of its log when the server ends, or takes too long."""
        give_up = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < give_up:
            if self._process.poll() is not None:
                raise AssertionError(f"{self.name} ended:\n{self.tail()}")
            try:
                with urllib.request.urlopen(f"http://{HOST}:{self.port}/server_info", timeout=5):
                    return
            except (OSError, urllib.error.URLError):
                time.sleep(0.2)
        raise AssertionError(f"{self.name} is not ready:\n{self.tail()}")

    def generate(self, tokens: Sequence[int], num_tokens: int, trace_parent: str = "", **more: Any) -> list[int]:
        """Greedy output ids. Raises with what the server says and its log when it refuses."""
        body = {"input_ids": list(tokens), "sampling_params": {"max_new_tokens": num_tokens, "temperature": 0}, **more}
        headers = {"Content-Type": "application/json"} | ({"traceparent": trace_parent} if trace_parent else {})
        asked = urllib.request.Request(f"http://{HOST}:{self.port}/generate", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(asked, timeout=ANSWER_TIMEOUT_S) as answer:
                told = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")
            raise AssertionError(f"{self.name} answered {error.code}: {said}\n{self.tail()}") from error
        return [int(token) for token in told["output_ids"]]

    def wait_ended(self, timeout_s: float) -> int:
        return self._process.wait(timeout_s)

    def tail(self, num_lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def close(self) -> None:
        """End the whole family: sglang's schedulers do not always go with the process that started them."""
        self._end.close()
