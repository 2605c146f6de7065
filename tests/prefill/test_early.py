"""What is kept of readers that come before their request: whose frame counts when it is opened."""

from __future__ import annotations

from pdlink.control.frames import Abort, Release
from pdlink.layout.readers import ReaderSet
from pdlink.prefill.early import Early
from pdlink.transfer.failure import Failure, FailureReason
from tests.prefill.rig import LIVENESS_S, SOLO, subscribe

OTHER = ReaderSet("other")
ENOUGH = Failure(FailureReason.ABORTED, "enough")


def attempts(early: Early, now: float) -> list[int]:
    return [attempt for _, attempt, _ in early.in_order(now - LIVENESS_S)]


def test_a_reader_that_waits_and_shows_itself_counts_however_long_it_waits() -> None:
    early = Early()
    for now in range(100):
        early.keep(b"x", 1, subscribe(SOLO), now)
    assert attempts(early, 99.0) == [1]


def test_a_reader_that_has_died_while_it_waited_keeps_nobody_out() -> None:
    """The request is tried again with other decode ranks, whose set is another one."""
    early = Early()
    early.keep(b"x", 1, subscribe(SOLO), 0.0)
    early.keep(b"y", 2, subscribe(OTHER), LIVENESS_S)
    assert attempts(early, LIVENESS_S) == [1, 2]
    assert attempts(early, LIVENESS_S + 1) == [2]


def test_what_is_not_repeated_counts_though_it_is_old() -> None:
    early = Early()
    early.keep(b"x", 1, Release(SOLO), 0.0)
    early.keep(b"y", 2, Abort(ENOUGH, OTHER), 0.0)
    assert attempts(early, 10 * LIVENESS_S) == [1, 2]


def test_those_who_want_the_request_come_before_those_who_do_not() -> None:
    early = Early()
    early.keep(b"x", 1, Abort(ENOUGH, SOLO), 0.0)
    early.keep(b"y", 2, subscribe(OTHER), 1.0)
    assert attempts(early, 1.0) == [2, 1]
