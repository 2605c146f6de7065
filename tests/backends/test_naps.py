"""Only the thread that asks for exact sleeps gets them."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator

import pytest

from pdlink.backends.naps import SLACK_NS, sharpen

PR_SET_TIMERSLACK, PR_GET_TIMERSLACK = 29, 30
USUAL_NS = 50_000


def slack_ns() -> int:
    return int(ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0))


@pytest.fixture
def slack_before() -> Iterator[int]:
    """The usual one, whatever other tests made of that of this thread."""
    libc, found = ctypes.CDLL(None), slack_ns()
    libc.prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(USUAL_NS), 0, 0, 0)
    yield USUAL_NS
    libc.prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(found), 0, 0, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such slack")
def test_a_thread_that_is_sharpened_has_little_slack_and_its_neighbour_keeps_its_own(slack_before: int) -> None:
    seen: dict[str, int] = {}

    def run() -> None:
        sharpen()
        sharpen()
        seen["sharp"] = slack_ns()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen["sharp"] == SLACK_NS < slack_before
    assert slack_ns() == slack_before
