"""Bad input to the demo is one line and exit code 2, and nothing is left behind, however it ends."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pdlink.cli.main import main
from tests import processes
from tests.demo.command import COMMAND, Ended, run_command

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("demo")]
TINY = ("--model", "glm-dsa-tiny", "--cp", "2")
Demo = Callable[..., Ended]


@pytest.fixture
def demo(capsys: pytest.CaptureFixture[str]) -> Demo:
    """The command in this process, which has imported what it needs: for runs that end before they start one."""

    def run(*arguments: str) -> Ended:
        code = main(["demo", *arguments])
        return Ended(code, *capsys.readouterr())

    return run


def assert_refused(ended: Ended, said: list[str]) -> None:
    assert ended.code == 2, ended.err
    assert len(ended.error_lines) == 1, ended.err
    assert "Traceback" not in ended.err
    assert [word for word in said if word not in ended.error_lines[0]] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "gpt-9"], ["gpt-9", "smollm2", "glm-dsa-tiny"]),
        (["--model", "glm-dsa-tiny", "--cp", "8"], ["--cp 8", "7 layers"]),
        (["--model", "glm-dsa-tiny", "--pp", "2", "--cp", "5"], ["--cp 5", "4 layers of a stage", "at most 4"]),
        (["--model", "glm-dsa-tiny", "--pp", "8"], ["--pp 8", "7 layers"]),
        ([*TINY, "--pp", "0"], ["--pp", "0"]),
        ([*TINY, "--decode-tp", "5"], ["--decode-tp 5", "4 heads", "at most 4"]),
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
    ],
    ids=lambda one: " ".join(one)[:48] if isinstance(one, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(demo: Demo, arguments: list[str], said: list[str]) -> None:
    assert_refused(demo(*arguments), said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--pool-pages", "100000000"], ["/dev/shm"]), (["--prompt", "x" * 2000], ["2001", "64"])],
    ids=["larger-than-memory", "larger-than-pool"],
)
def test_what_only_the_ranks_can_refuse_is_one_line_too(arguments: list[str], said: list[str]) -> None:
    assert_refused(run_command("demo", *TINY, *arguments), said)


def test_the_installed_command_refuses_alike() -> None:
    assert_refused(run_command("demo", "--model", "gpt-9"), ["gpt-9", "smollm2", "glm-dsa-tiny"])


def test_a_wrong_setting_is_refused_by_name(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDLINK_TRANSFER_TIMOUT_S", "3")
    ended = demo(*TINY)
    assert ended.code == 2
    assert "PDLINK_TRANSFER_TIMOUT_S" in ended.error_lines[0]
    assert "PDLINK_TRANSFER_TIMEOUT_S" in ended.error_lines[0]


def test_the_backend_of_the_environment_is_used_and_checked(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDLINK_BACKENDS", "smoke-signals")
    ended = demo(*TINY)
    assert ended.code == 2
    assert "smoke-signals" in ended.error_lines[0]


def test_a_host_that_is_not_known_is_refused_with_the_reason(demo: Demo) -> None:
    ended = demo(*TINY, "--bootstrap", "no-such-host.invalid:0")
    assert ended.code == 2
    assert "no-such-host.invalid" in ended.error_lines[0]
    assert "in use" not in ended.error_lines[0]


def test_a_port_in_use_is_refused(demo: Demo) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = demo(*TINY, "--bootstrap", f"127.0.0.1:{port}")
    assert ended.code == 2
    assert f"127.0.0.1:{port}" in ended.error_lines[0]
    assert "already in use" in ended.error_lines[0]


def test_a_prompt_file_that_is_no_text_is_refused(demo: Demo, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"\xff\xfe\x00binary")
    ended = demo(*TINY, "--prompt-file", str(path))
    assert ended.code == 2
    assert "not UTF-8" in ended.error_lines[0]


def test_a_dump_folder_in_use_is_refused(demo: Demo, tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    ended = demo(*TINY, "--dump", str(tmp_path))
    assert ended.code == 2
    assert "not empty" in ended.error_lines[0]
    assert (tmp_path / "kept.txt").read_text() == "mine"


@pytest.fixture
def running() -> Iterator[subprocess.Popen[str]]:
    """A demo whose ranks have registered and are at work."""
    with processes.started(
        [COMMAND, "demo", *TINY, "--new-tokens", "200", "--pool-pages", "128"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # also where these tests run under nohup
    ) as child:
        for line in child.stderr:
            if "pulled" in line:
                break
        yield child


def ranks_of(pid: int) -> list[psutil.Process]:
    """The four processes of a demo, which on a slow machine may be between its two runs just now."""
    found: list[psutil.Process] = []

    def are_four() -> bool:
        found[:] = psutil.Process(pid).children(recursive=True)
        return len(found) == 4

    assert processes.wait_until(are_four), found
    return found


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=[pytest.mark.slow, pytest.mark.thorough]),
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
    ],
    ids=lambda one: one.name,
)
def test_an_interrupted_demo_leaves_no_process_and_no_shared_memory(
    running: subprocess.Popen[str], number: signal.Signals
) -> None:
    children = ranks_of(running.pid)
    segments = {path for one in children for path in Path("/dev/shm").glob(f"pdlink-{one.pid}-*")}
    assert segments
    running.send_signal(number)
    out, err = running.communicate(timeout=processes.PATIENCE_S)
    expected = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGKILL: -9}
    assert running.returncode == expected[number], err
    assert "Traceback" not in out + err
    _, alive = psutil.wait_procs(children, timeout=processes.PATIENCE_S)
    assert alive == []
    assert processes.wait_until(lambda: not any(path.exists() for path in segments)), segments
