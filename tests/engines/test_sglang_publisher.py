"""The threads that publish for sglang: after device events, in turn, and what is quiet when a room is used again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from pdlink.errors import InvalidInput
from pdlink.transfer.failure import Failure, FailureReason
from pdlink_engines.sglang.draining import Draining
from pdlink_engines.sglang.publisher import NUM_THREADS, Publisher, PublishJob

WAIT_S = 60.0


@dataclass
class Event:
    happened: bool = False
    asked: threading.Event = field(default_factory=threading.Event)

    def query(self) -> bool:
        self.asked.set()
        return self.happened


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher(event_timeout_s=WAIT_S)
    yield made
    made.close()
    made.close()


def no_failure(failure: Failure) -> None:
    raise AssertionError(failure)


def test_a_job_waits_for_its_event_and_the_next_one_of_its_room_for_it(publisher: Publisher) -> None:
    event, done, order = Event(), threading.Event(), []
    waiting = publisher.order()
    publisher.submit(waiting, PublishJob(event, lambda: order.append("first"), no_failure))
    publisher.submit(waiting, PublishJob(None, lambda: (order.append("second"), done.set()), no_failure))
    assert event.asked.wait(WAIT_S)
    # On every thread, that of the waiting one too, others go on.
    for other in [publisher.order() for _ in range(NUM_THREADS)]:
        published = threading.Event()
        publisher.submit(other, PublishJob(None, published.set, no_failure))
        assert published.wait(WAIT_S)
    assert order == []
    event.happened = True
    assert done.wait(WAIT_S)
    assert order == ["first", "second"]


@pytest.mark.parametrize(
    ("raised", "reason"), [(InvalidInput("no such page"), FailureReason.PLAN), (KeyError("x"), FailureReason.INTERNAL)]
)
def test_a_job_that_fails_says_so_and_the_next_one_runs(
    publisher: Publisher, raised: Exception, reason: FailureReason
) -> None:
    def fail() -> None:
        raise raised

    failed: Future[Failure] = Future()
    done = threading.Event()
    order = publisher.order()
    publisher.submit(order, PublishJob(None, fail, failed.set_result))
    publisher.submit(order, PublishJob(None, done.set, no_failure))
    assert failed.result(WAIT_S).reason is reason
    assert done.wait(WAIT_S)


def test_an_event_that_never_happens_fails_the_request_in_time() -> None:
    publisher = Publisher(event_timeout_s=0.05)
    failed: Future[Failure] = Future()
    publisher.submit(publisher.order(), PublishJob(Event(), lambda: None, failed.set_result))
    assert "PDLINK_TRANSFER_TIMEOUT_S" in failed.result(WAIT_S).text
    publisher.close()


def test_requests_take_the_threads_in_turn(publisher: Publisher) -> None:
    names = []
    for order in [publisher.order() for _ in range(NUM_THREADS)]:
        named: Future[str] = Future()
        job = PublishJob(None, lambda named=named: named.set_result(threading.current_thread().name), no_failure)
        publisher.submit(order, job)
        names.append(named.result(WAIT_S))
    assert len(set(names)) == NUM_THREADS


def test_an_event_that_cannot_be_asked_fails_its_request_and_no_other(publisher: Publisher) -> None:
    class Broken:
        def query(self) -> bool:
            raise RuntimeError("device lost")

    failed: Future[Failure] = Future()
    done = threading.Event()
    order = publisher.order()
    publisher.submit(order, PublishJob(Broken(), lambda: None, failed.set_result))
    publisher.submit(order, PublishJob(None, done.set, no_failure))
    assert "device lost" in failed.result(WAIT_S).text
    assert done.wait(WAIT_S)


@dataclass(eq=False)
class Drain:
    is_quiet: bool = False


def test_a_room_that_is_used_again_is_quiet_only_once_all_its_receivers_are() -> None:
    draining, older, newer = Draining(), Drain(), Drain()
    draining.hold(7, older)
    draining.hold(7, newer)
    assert draining.is_quiet(8)
    newer.is_quiet = True
    draining.let_go(7, newer)
    assert not draining.is_quiet(7)
    draining.let_go(7, older)
    assert not draining.is_quiet(7)  # the engine is through with it, and something may still land
    older.is_quiet = True
    assert draining.is_quiet(7)


def test_receivers_that_are_quiet_are_forgotten() -> None:
    draining, first = Draining(), Drain()
    draining.hold(1, first)
    first.is_quiet = True
    draining.hold(2, Drain())
    first.is_quiet = False
    assert draining.is_quiet(1)
