"""Whether a process that was met is still there: alive, killed (waited for or not), or another of its number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pdlink.memory.presence import has_ended, own_presence
from tests.processes import started

PROGRAM = """
import sys
from pdlink.memory.presence import own_presence
print(own_presence().decode(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with started([sys.executable, "-c", PROGRAM], text=True, **pipes) as process:
        yield process


def test_a_process_has_ended_once_it_is_killed_waited_for_or_not(other: subprocess.Popen[str]) -> None:
    assert other.stdout is not None
    presence = other.stdout.readline().encode()
    assert not has_ended(presence)
    other.kill()
    # Its output ends with it, and then it is a zombie, or about to be one.
    assert other.stdout.read() == ""
    assert has_ended(presence)
    other.wait()
    assert has_ended(presence)


def test_this_process_is_there() -> None:
    assert not has_ended(own_presence())


def test_another_process_of_the_same_number_is_not_it() -> None:
    host, pid, started = json.loads(own_presence())
    assert pid == os.getpid()
    assert has_ended(json.dumps([host, pid, started + 1]).encode())


def test_of_a_process_on_another_host_nothing_is_known() -> None:
    _, pid, started = json.loads(own_presence())
    assert not has_ended(json.dumps(["another boot", pid, started + 1]).encode())
