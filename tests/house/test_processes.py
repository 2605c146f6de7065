"""Processes of tests end with their families, whoever fails; and every test starts its processes by the one helper."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import processes
from tests.house.tree import REPO, Module

# The child starts one of its own in another session, which neither dies with it nor lets its output end.
PARENT = """
import subprocess, sys, time
command = [sys.executable, "-c", "import time; time.sleep(300)"]
print(subprocess.Popen(command, start_new_session=True).pid, flush=True)
ENDING
"""
STARTERS = {"subprocess.Popen", "subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"}
STARTERS |= {"os.fork", "os.system", "os.popen", "os.posix_spawn", "multiprocessing.Process"}
MAY_START = {
    "tests/sidecar/engine.py": "it is a child itself, whose fork is of the child's family and ends by itself",
    "tests/processes.py": "it is the helper",
    "tests/sglang/nursery.py": "it forks processes that have sglang imported, and is itself started by the helper",
}


def parent(ending: str) -> list[str]:
    return [sys.executable, "-c", PARENT.replace("ENDING", ending)]


def are_gone(*pids: int) -> bool:
    return processes.wait_until(lambda: not any(map(psutil.pid_exists, pids)))


@pytest.mark.parametrize("ending", ["time.sleep(300)", "sys.exit(0)"], ids=["runs on", "has ended"])
def test_a_block_that_fails_ends_the_family(ending: str) -> None:
    pids = []

    def fail() -> None:
        with processes.started(parent(ending), stdout=subprocess.PIPE, text=True) as child:
            pids.extend([child.pid, int(child.stdout.readline())])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert are_gone(*pids)


def test_a_block_that_ends_ends_the_family_too() -> None:
    with processes.started(parent("time.sleep(300)"), stdout=subprocess.PIPE, text=True) as child:
        grandchild = int(child.stdout.readline())
    assert are_gone(child.pid, grandchild)


@pytest.mark.parametrize("wind_down_s", [0.2, None])
def test_a_process_that_ended_and_left_another_is_a_failure_unless_it_may(wind_down_s: float | None) -> None:
    pids = []

    def leave() -> None:
        options = {"stdout": subprocess.PIPE, "text": True, "wind_down_s": wind_down_s}
        with processes.started(parent("sys.exit(0)"), **options) as child:
            pids.append(int(child.stdout.readline()))
            child.wait(processes.PATIENCE_S)

    with contextlib.nullcontext() if wind_down_s is None else pytest.raises(AssertionError, match="outlive"):
        leave()
    assert are_gone(*pids)


def test_a_run_that_takes_too_long_ends_with_its_family(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    note = f"import os; open({str(pids)!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    timeout_s = 1.0
    while not pids.exists():  # a slow machine may need longer to come that far
        timeout_s *= 2
        with pytest.raises(subprocess.TimeoutExpired) as caught:
            processes.run(parent(note), timeout_s=timeout_s)
    assert are_gone(*map(int, [*(caught.value.output or b"").split(), *pids.read_text().split()]))


def test_a_run_gives_both_outputs_and_the_code() -> None:
    code = "import sys; print(sys.stdin.read() + 'out'); print('err', file=sys.stderr); sys.exit(3)"
    done = processes.run([sys.executable, "-c", code])
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")
    with pytest.raises(AssertionError, match="exited with 3"):
        processes.run([sys.executable, "-c", code], check=True)


def starts(module: Module) -> Iterator[str]:
    """Calls that start a process, as they are named."""
    for node in ast.walk(module.parse()):
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in STARTERS:
            yield f"{module.name}:{node.lineno} calls {name}"


def test_a_process_started_otherwise_is_found() -> None:
    assert list(starts(Module("sample", "import subprocess\nsubprocess.run(['true'])\n"))) == [
        "sample:2 calls subprocess.run"
    ]


def test_tests_start_their_processes_by_the_helper() -> None:
    paths = sorted((REPO / "tests").rglob("*.py"))
    assert len(paths) > 100
    names = {path: str(path.relative_to(REPO)) for path in paths}
    found = [
        call
        for path, name in names.items()
        if name not in MAY_START
        for call in starts(Module(name, path.read_text(encoding="utf-8")))
    ]
    assert found == []


def test_a_process_in_the_middle_of_its_exec_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment is empty for a moment."""
    read, blind = Path.read_bytes, ["child"]

    def read_later(path: Path) -> bytes:
        return b"" if str(path) == f"/proc/{child.pid}/environ" and blind and blind.pop() else read(path)

    environ = {**os.environ, "MARK_OF_A_TEST": "1"}
    with processes.started([sys.executable, "-c", "import time; time.sleep(300)"], env=environ) as child:
        monkeypatch.setattr(Path, "read_bytes", read_later)
        assert processes.in_environment(lambda names: "MARK_OF_A_TEST" in names) == [child.pid]
        assert blind == []


def test_a_killed_process_holds_no_lock_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """When `kill_all` has returned, what the process had locked is free, however long it takes to die."""
    code = "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX)"
    code += "; print('locked', flush=True); time.sleep(300)"
    kill = os.kill

    def kill_late(pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            kill(pid, number)

    monkeypatch.setattr(processes.os, "kill", lambda *told: threading.Timer(0.5, kill_late, told).start())
    with tempfile.NamedTemporaryFile() as file:
        command = [sys.executable, "-c", code, file.name]
        with processes.started(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout.readline() == "locked\n"
            assert not processes.is_over(child.pid)
            pids = [child.pid]
            processes.kill_all(lambda: [pids.pop()] if pids else [])
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            assert processes.is_over(child.pid)
