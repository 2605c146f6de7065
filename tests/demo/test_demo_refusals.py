"""Bad input to the demo is one line and exit code 2, and nothing is left behind, however it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.demo.command import COMMAND, run_command

pytestmark = [pytest.mark.timeout(240), pytest.mark.xdist_group("demo")]
TINY = ("--model", "glm-dsa-tiny", "--cp", "2")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "gpt-9"], ["gpt-9", "smollm2", "glm-dsa-tiny"]),
        (["--model", "glm-dsa-tiny", "--cp", "8"], ["--cp 8", "7 layers"]),
        ([*TINY, "--prompt", ""], ["prompt", "empty"]),
        ([*TINY, "--prompt-file", "/nowhere/prompt.txt"], ["/nowhere/prompt.txt", "No such file"]),
        ([*TINY, "--page-size", "0"], ["--page-size", "0"]),
        ([*TINY, "--pool-pages", "0"], ["--pool-pages", "0"]),
        ([*TINY, "--new-tokens", "0"], ["--new-tokens", "0"]),
        ([*TINY, "--chunk", "-3"], ["--chunk", "-3"]),
        ([*TINY, "--backend", "smoke-signals"], ["smoke-signals", "ipc"]),
        ([*TINY, "--bootstrap", "127.0.0.1:99999"], ["127.0.0.1:99999", "65535"]),
        ([*TINY, "--bootstrap", "0.0.0.0:0"], ["0.0.0.0", "PDLINK_ADVERTISE_HOST"]),
        (["--model", "glm-dsa-tiny", "--cp", "1", "--inject", "skip-owner"], ["skip-owner", "--cp 2"]),
        (["--model", "glm-dsa-tiny", "--cp", "7", "--inject", "swap-layers"], ["swap-layers", "two layers"]),
        ([*TINY, "--pool-pages", "100000000"], ["/dev/shm"]),
        ([*TINY, "--prompt", "x" * 2000], ["2001", "64"]),
    ],
    ids=lambda one: " ".join(one)[:48] if isinstance(one, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], said: list[str]) -> None:
    ended = run_command("demo", *arguments)
    assert ended.code == 2, ended.err
    assert len(ended.error_lines) == 1, ended.err
    assert "Traceback" not in ended.err
    assert [word for word in said if word not in ended.error_lines[0]] == []


def test_a_wrong_setting_is_refused_by_name() -> None:
    ended = run_command("demo", *TINY, env={**os.environ, "PDLINK_TRANSFER_TIMOUT_S": "3"})
    assert ended.code == 2
    assert "PDLINK_TRANSFER_TIMOUT_S" in ended.error_lines[0]
    assert "PDLINK_TRANSFER_TIMEOUT_S" in ended.error_lines[0]


def test_the_backend_of_the_environment_is_used_and_checked() -> None:
    ended = run_command("demo", *TINY, env={**os.environ, "PDLINK_BACKENDS": "smoke-signals"})
    assert ended.code == 2
    assert "smoke-signals" in ended.error_lines[0]


def test_a_host_that_is_not_known_is_refused_with_the_reason() -> None:
    ended = run_command("demo", *TINY, "--bootstrap", "no-such-host.invalid:0")
    assert ended.code == 2
    assert "no-such-host.invalid" in ended.error_lines[0]
    assert "in use" not in ended.error_lines[0]


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run_command("demo", *TINY, "--bootstrap", f"127.0.0.1:{port}")
    assert ended.code == 2
    assert f"127.0.0.1:{port}" in ended.error_lines[0]
    assert "already in use" in ended.error_lines[0]


def test_a_prompt_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"\xff\xfe\x00binary")
    ended = run_command("demo", *TINY, "--prompt-file", str(path))
    assert ended.code == 2
    assert "not UTF-8" in ended.error_lines[0]


def test_a_dump_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    ended = run_command("demo", *TINY, "--dump", str(tmp_path))
    assert ended.code == 2
    assert "not empty" in ended.error_lines[0]
    assert (tmp_path / "kept.txt").read_text() == "mine"


@pytest.fixture
def running() -> Iterator[subprocess.Popen[str]]:
    """A demo whose ranks have registered and are at work."""
    child = subprocess.Popen(
        [str(COMMAND), "demo", *TINY, "--new-tokens", "200", "--pool-pages", "128"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    for line in child.stderr:
        if "pulled" in line:
            break
    yield child
    child.kill()
    child.communicate()


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
        signal.SIGKILL,
    ],
    ids=lambda one: one.name,
)
def test_an_interrupted_demo_leaves_no_process_and_no_shared_memory(
    running: subprocess.Popen[str], number: signal.Signals
) -> None:
    children = psutil.Process(running.pid).children(recursive=True)
    segments = {path for one in children for path in Path("/dev/shm").glob(f"pdlink-{one.pid}-*")}
    assert len(children) == 4
    assert segments
    running.send_signal(number)
    out, err = running.communicate(timeout=60)
    expected = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGKILL: -9}
    assert running.returncode == expected[number], err
    assert "Traceback" not in out + err
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
    until = time.monotonic() + 5
    while any(path.exists() for path in segments) and time.monotonic() < until:
        time.sleep(0.05)
    assert [path for path in segments if path.exists()] == []
