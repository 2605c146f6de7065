"""Native libraries while the interpreter ends under threads that use them."""

from __future__ import annotations

import sys

import pytest

from tests import processes
from tests.backends.needs import needs_mooncake, nixl_missing

NIXL = """
from pdlink.backends.nixl_engine import Agent
agents = [Agent() for _ in range(3)]
num_threads = 3

def use(number):
    agents[number].call("be driven", lambda nixl: nixl.get_new_notifs())
"""
MOONCAKE = """
from pdlink.backends.mooncake_engine import PENDING, Engine
here, there = Engine("127.0.0.1", "tcp"), Engine("127.0.0.1", "tcp")
here.offer([]), there.offer([])

num_threads = 1

def use(number):
    posted = here.read_byte(there.session, there._spare.address)
    while here.check(posted) == PENDING:
        pass
"""
AT_WORK = """
import atexit, itertools, threading, time
counted, refused = itertools.count(), threading.Event()

def look():
    before = next(counted)
    time.sleep(0.2)
    print("uses at the end:", next(counted) - before - 1, "refused:", refused.is_set())
    use(0)
    print("the main thread may")

atexit.register(look)  # so that it comes after what is registered from now on
{library}
from pdlink.errors import BackendError

def work(number):
    try:
        while True:
            use(number)
            next(counted)
    except BackendError:
        refused.set()

for number in range(num_threads):
    threading.Thread(target=work, args=(number,), daemon=True).start()
while next(counted) < 1000:
    time.sleep(0.001)
"""


@pytest.mark.parametrize(
    "library",
    [
        pytest.param(NIXL, id="nixl", marks=pytest.mark.skipif(bool(nixl_missing()), reason=nixl_missing())),
        pytest.param(MOONCAKE, id="mooncake", marks=needs_mooncake),
    ],
)
def test_threads_at_work_in_a_library_come_out_before_the_interpreter_ends(library: str) -> None:
    done = processes.run([sys.executable, "-c", AT_WORK.replace("{library}", library)])
    assert done.returncode == 0, done.stderr
    assert "terminate" not in done.stderr
    assert done.stdout.splitlines()[-2:] == ["uses at the end: 0 refused: True", "the main thread may"]
