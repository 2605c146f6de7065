"""The check that a run leaves nothing behind does find what is left, alone and with several workers."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests import processes
from tests.house.runs import run_pytest, segment_of

LEAVES_A_SEGMENT = """
from multiprocessing import resource_tracker, shared_memory

def test_leaves_a_segment():
    segment = shared_memory.SharedMemory(name="NAME", create=True, size=64)
    resource_tracker.unregister(segment._name, "shared_memory")
    kept.append(segment) if KEPT else segment.close()

kept = []
"""
LEAVES_A_PROCESS = """
import subprocess, sys

def test_leaves_a_process(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    open("PIDFILE", "w").write(str(child.pid))
    child.returncode = 0  # Python is not to warn of it: the run is to find it
"""
LEAVES_A_FORK = """
import os, time

def test_leaves_a_fork():
    pid = os.fork()
    if not pid:
        os.closerange(0, 1024)  # whoever reads the output of the run is not to wait for this
        time.sleep(300)
        os._exit(0)
    open("PIDFILE", "w").write(str(pid))
"""
LEAVES_NOTHING = "def test_leaves_nothing():\n    pass\n"
SKIPS = "import pytest\n\ndef test_skips():\n    pytest.skip('no such device')\n"


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("options", [(), ("-n", "2")])
def test_a_segment_that_is_left_fails_the_run(tmp_path: Path, options: tuple[str, ...], kept: bool) -> None:
    name = segment_of(tmp_path)
    done = run_pytest(tmp_path, LEAVES_A_SEGMENT.replace("NAME", name).replace("KEPT", str(kept)), *options)
    assert done.returncode == 1, done.stdout
    assert name in done.stdout
    assert not Path("/dev/shm", name).exists(), "the next run is not to suffer from it"


@pytest.mark.parametrize(
    ("source", "options"), [(LEAVES_A_PROCESS, ()), (LEAVES_A_PROCESS, ("-n", "2")), (LEAVES_A_FORK, ())]
)
def test_a_process_that_is_left_fails_the_run(tmp_path: Path, source: str, options: tuple[str, ...]) -> None:
    pidfile = tmp_path / "pid"
    done = run_pytest(tmp_path, source.replace("PIDFILE", str(pidfile)), *options)
    pid = int(pidfile.read_text())
    assert done.returncode == 1, done.stdout
    assert f"process {pid} lives on" in done.stdout
    assert processes.wait_until(lambda: not psutil.pid_exists(pid)), "the next run is not to suffer from it"


@pytest.mark.parametrize("options", [(), ("-n", "2")])
def test_a_run_that_leaves_nothing_passes(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = run_pytest(tmp_path, LEAVES_NOTHING, *options)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_a_skip_fails_the_run_in_ci_only(tmp_path: Path) -> None:
    assert run_pytest(tmp_path, SKIPS).returncode == 0
    done = run_pytest(tmp_path, SKIPS, CI="true")
    assert done.returncode == 1
    assert "1 tests were skipped" in done.stdout
