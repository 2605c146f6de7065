"""A thread that ends unasked is told of once, whatever ended it."""

import logging
import threading
from collections.abc import Callable

import pytest

from pdlink.errors import LimitReached, StateError
from pdlink.events import Event, Events
from pdlink.health import MAX_REASONS, Health
from pdlink.threads import Countdown, Death, Pool, SupervisedThread

TIMEOUT_S = 60.0
KINDS = [ValueError("v"), MemoryError(), SystemExit(3), KeyboardInterrupt(), GeneratorExit()]


class Record:
    """What was told of deaths: to the owner, as events, and in which order."""

    def __init__(self) -> None:
        self.events = Events()
        self.events.subscribe(self._hear)
        self.told: list[Death] = []
        self.emitted: list[Event] = []
        self.order: list[str] = []

    def _hear(self, event: Event) -> None:
        self.emitted.append(event)
        self.order.append("event")

    def die(self, death: Death) -> None:
        self.told.append(death)
        self.order.append("owner")

    def thread(self, body: Callable[[], None], **changes: object) -> SupervisedThread:
        told = {"events": self.events, "on_death": self.die, "at_end": lambda: self.order.append("end")} | changes
        return SupervisedThread(body, "pdlink-x", "part x", **told)


def raiser(error: BaseException) -> Callable[[], None]:
    def body() -> None:
        raise error

    return body


@pytest.mark.parametrize("error", KINDS, ids=lambda error: type(error).__name__)
def test_whatever_a_body_raises_is_a_death_that_is_logged_and_told_of_once(error, caplog) -> None:
    record = Record()
    thread = record.thread(raiser(error))
    thread.start()
    assert thread.join(TIMEOUT_S)
    assert record.order == ["event", "owner", "end"]
    assert [death.error for death in record.told] == [error]
    assert thread.death is record.told[0]
    assert thread.death.text.startswith(f"thread pdlink-x of part x died ({type(error).__name__}")
    assert record.emitted[0].name == "thread.died"
    assert record.emitted[0].fields["owner"] == "part x"
    (line,) = [one for one in caplog.records if one.levelno == logging.CRITICAL]
    assert line.exc_info
    assert line.exc_info[1] is error


def test_a_return_that_nobody_asked_for_is_a_death_and_one_that_was_is_none() -> None:
    record = Record()
    for asked in (True, False):
        thread = record.thread(lambda: None, was_asked=lambda asked=asked: asked)
        thread.start()
        assert thread.join(TIMEOUT_S)
        assert (thread.death is None) is asked
    assert [str(death.error) for death in record.told] == ["it returned without being asked to"]
    assert record.order == ["end", "event", "owner", "end"]


def test_an_owner_that_raises_while_it_is_told_still_has_its_end(caplog) -> None:
    record = Record()
    thread = record.thread(raiser(SystemExit()), on_death=lambda death: raiser(SystemExit(9))())
    thread.start()
    assert thread.join(TIMEOUT_S)
    assert record.order == ["event", "end"]
    assert "the end of thread pdlink-x could not be dealt with" in caplog.text


def test_a_thread_that_cannot_be_had_is_a_typed_error(monkeypatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(LimitReached, match=r"thread pdlink-x of part x cannot be started: .*ulimit -u"):
        Record().thread(lambda: None).start()


@pytest.mark.parametrize("error", KINDS, ids=lambda error: type(error).__name__)
def test_a_call_of_a_pool_that_raises_is_told_of_and_the_next_one_runs(error) -> None:
    record, ran = Record(), threading.Event()
    pool = Pool("pdlink-pool", "part x", 1, record.events)
    pool.submit(raiser(error), record.die)
    pool.submit(raiser(error))
    pool.submit(ran.set)
    assert ran.wait(TIMEOUT_S)
    pool.close()
    pool.close()
    assert [death.error for death in record.told] == [error]
    assert record.order == ["event", "owner", "event"]
    with pytest.raises(StateError, match="closed"):
        pool.submit(ran.set)


def test_a_countdown_calls_once_its_time_is_over_unless_cancelled() -> None:
    rang, late = threading.Event(), threading.Event()
    Countdown(0.001, rang.set, "pdlink-x", "part x").start()
    assert rang.wait(TIMEOUT_S)
    countdown = Countdown(60.0, late.set, "pdlink-x", "part x")
    countdown.start()
    countdown.cancel()
    countdown.cancel()
    assert countdown._thread.join(TIMEOUT_S)
    assert not late.is_set()


def test_health_is_red_for_the_part_that_lost_a_thread_and_says_why() -> None:
    record = Record()
    health = Health(record.events)
    health.add("part x")
    health.add("part y")
    assert health.report().ok
    record.events.emit("something.else", owner="part y")
    thread = record.thread(raiser(SystemExit(3)))
    thread.start()
    assert thread.join(TIMEOUT_S)
    report = health.report()
    assert not report.ok
    assert report.reasons == ("thread pdlink-x of part x died (SystemExit: 3)",)
    assert report.parts == {"part x": report.reasons[0], "part y": ""}
    for number in range(100):
        record.events.emit("thread.died", owner="part x", text=f"again {number}")
    assert health.report().parts["part x"].count(";") == MAX_REASONS - 1
    health.close()
    health.close()
    record.events.emit("thread.died", owner="part y", text="late")
    assert health.report().parts["part y"] == ""
