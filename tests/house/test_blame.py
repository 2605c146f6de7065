"""A test that fails fails alone: its processes end, and what it left open is told of no other test."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests import processes
from tests.house.runs import run_pytest

# The child has a child in a session of its own; the test holds its pipes in the frame that fails.
FAILS = """
import gc, os, subprocess, sys, time
import pytest

CHILD = '''
import os, subprocess, sys, time
command = [sys.executable, "-c", "import time; time.sleep(300)"]
print(subprocess.Popen(command, start_new_session=True).pid, flush=True)
time.sleep(300)
'''

def test_that_fails():
    held = []
    held.append(held)  # only the collector finds it
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    held.append(child)
    number = int(child.stdout.readline())
    open("PIDS", "w").write(f"{child.pid} {number}")
    FAILURE

def test_that_follows():
    gc.collect()
"""


@pytest.mark.parametrize("options", [(), ("-n", "1")])
@pytest.mark.parametrize("failure", ["assert not held", "os.kill(os.getpid(), 14)"], ids=["fails", "times out"])
def test_what_a_failed_test_left_hurts_no_other(tmp_path: Path, failure: str, options: tuple[str, ...]) -> None:
    pids = tmp_path / "pids"
    source = FAILS.replace("PIDS", str(pids)).replace("FAILURE", failure)
    done = run_pytest(tmp_path, source, "-W", "error", "-o", "timeout=250", "-o", "timeout_method=signal", *options)
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "lives on" not in done.stdout
    assert len(pids.read_text().split()) == 2
    for pid in map(int, pids.read_text().split()):
        assert processes.wait_until(lambda pid=pid: not psutil.pid_exists(pid))


PASSES = """
import subprocess, sys

def test_that_passes():
    command = [sys.executable, "-c", "import time; time.sleep(300)"]
    subprocess.Popen(command)
"""


def test_a_test_that_passes_and_leaves_an_open_process_is_found_as_ever(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, PASSES, "-W", "error")
    assert done.returncode == 1
    assert "ResourceWarning" in done.stdout
    assert "1 failed" in done.stdout
