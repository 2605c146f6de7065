"""Children are heard, waited for no longer than asked, and end with their input, their parent, or by force."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from pdlink.errors import DeadlineExceeded
from pdlink.testing.child import Child, ChildEnded

ECHO = """
import json, sys
from pdlink.testing.parent import Parent
parent = Parent()
print("a library prints this")
for line in sys.stdin:
    parent.say({"heard": json.loads(line)})
sys.exit(int(sys.argv[1]))
"""
DEAF = """
import signal, sys, time
from pdlink.backends.shm import Segment
signal.signal(signal.SIGTERM, signal.SIG_IGN)
segment = Segment.create(4096)
print(segment.name, flush=True)
time.sleep(300)
"""


@pytest.fixture
def script(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "child.py"
        path.write_text(text)
        return path

    return write


def test_a_question_is_answered_and_what_libraries_print_stays_out_of_it(script, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Child("echo", script(ECHO), ["0"], log=log) as child:
        assert child.ask(60.0, word="wind") == {"heard": {"word": "wind"}}
        child.say([1, 2])
        assert child.hear(60.0) == {"heard": [1, 2]}
    assert log.read_text() == "a library prints this\n"


@pytest.mark.parametrize("code", [0, 7])
def test_the_exit_code_is_the_childs_own_and_closing_twice_is_fine(script, code: int) -> None:
    child = Child("echo", script(ECHO), [str(code)])
    assert child.close() == code
    assert child.close() == code
    assert not child.is_alive


def test_a_child_that_ends_is_named_with_its_code() -> None:
    with Child("the rank", "json.tool", ["/nowhere/at-all"]) as child:
        with pytest.raises(ChildEnded, match=r"the rank \(process \d+\) ended with code 2"):
            child.hear(60.0)
        with pytest.raises(ChildEnded, match="the rank"):
            child.say("anything")


def test_a_child_that_says_nothing_is_waited_for_a_while_only() -> None:
    with Child("the rank", "json.tool") as child, pytest.raises(DeadlineExceeded, match="the rank"):
        child.hear(0.05)


def test_a_child_ends_with_its_input() -> None:
    with Child("the rank", "json.tool") as child:
        child.say([1, 2])
        child.close_input()
        assert child.hear_text(60.0) == "["
    assert not psutil.pid_exists(child.pid)


def test_a_listener_hears_every_line_until_the_end(script) -> None:
    child = Child("echo", script(ECHO), ["0"])
    for number in range(3):
        child.say(number)
    child.close_input()
    assert list(child.listen()) == [f'{{"heard": {number}}}' for number in range(3)]
    assert child.close() == 0


def test_a_stopped_child_says_nothing_until_it_is_resumed(script) -> None:
    with Child("echo", script(ECHO), ["0"]) as child:
        child.ask(60.0, word="first")
        child.stop()
        child.say({"word": "second"})
        with pytest.raises(DeadlineExceeded):
            child.hear(0.2)
        child.resume()
        assert child.hear(60.0) == {"heard": {"word": "second"}}


def test_a_stopped_child_is_ended_by_force_at_once(script) -> None:
    child = Child("echo", script(ECHO), ["0"])
    child.ask(60.0, word="first")
    child.stop()
    began = time.monotonic()
    assert child.close() == -signal.SIGKILL
    assert time.monotonic() - began < 10


def test_a_child_that_does_not_end_is_killed_and_leaves_no_shared_memory(script) -> None:
    child = Child("deaf", script(DEAF))
    name = child.hear_text(60.0)
    assert Path("/dev/shm", name).exists()
    assert child.close(timeout_s=0.2) == -signal.SIGKILL
    assert not Path("/dev/shm", name).exists()
