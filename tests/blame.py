"""Owns that a test which fails fails alone: what it left open or running is ended here, and told of no other test.

Warnings stay errors: a test that passes and leaves something is found as ever.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Iterator

import pytest

from tests import processes

# In the environment of everything that a run starts, so that orphans can be told from strangers.
RUN = "PYTEST_RUN_OF_PDLINK"
FAILED = pytest.StashKey[bool]()
SERVERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    done = yield
    if item.stash.get(FAILED, False):
        processes.kill_all(lambda: started_by(item.nodeid))
        processes.sweep()
        forget_leftovers()
    return done


def started_by(nodeid: str) -> list[int]:
    """What runs of the processes that the test itself started, whatever they started in turn.

    Those of its fixtures are not among them: they may belong to others too, and end with the fixture.
    """
    wanted = {"PYTEST_CURRENT_TEST": f"{nodeid} (call)", RUN: os.environ[RUN]}
    found = processes.in_environment(lambda names: wanted.items() <= names.items())
    return [pid for pid in found if not is_server(pid)]


def is_server(pid: int) -> bool:
    """multiprocessing's own servers serve all tests of this process, and end with it."""
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8") as file:
            command = file.read()
    except OSError:
        return False
    return any(name in command for name in SERVERS)


def forget_leftovers() -> None:
    """Let go of what the frames of the failed test hold, now and in silence, rather than in the middle of another."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    heard = sys.unraisablehook
    sys.unraisablehook = lambda lost: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # What one round lets go of may have held more.
            for _ in range(3):
                gc.collect()
    finally:
        sys.unraisablehook = heard
