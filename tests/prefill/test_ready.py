"""Nobody hears of a publication before the device has written it, and the engine never waits for that."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdlink.control.frames import Failed, Ready, Subscribed
from pdlink.errors import StateError
from pdlink.prefill.ready_watch import ReadyWatch
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.states import SenderState
from tests.prefill.rig import LEASE_S, NUM_PAGES, Rig


class Event:
    """A device event as engines have them, over a `threading.Event`."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None

    def query(self) -> bool:
        if self.error:
            raise self.error
        return self.done.is_set()


class DeviceFailure(RuntimeError):
    """What an engine's library raises."""


@pytest.fixture
def rig() -> Rig:
    made = Rig()
    made.subscribe(1)
    made.sent.clear()
    return made


def positions(rig: Rig) -> list[tuple[int, int]]:
    """[start, stop) of what readers were told of since the last look."""
    return [(one.start_page, one.start_page + len(one.page_ids)) for one in rig.take(Ready)]


def test_a_publication_is_told_when_its_event_is_done_and_not_before(rig: Rig) -> None:
    event = Event()
    rig.sender.publish([3, 4], ready=event, last=True)
    assert rig.waiting == [rig.sender]
    assert rig.sender.look_ready()
    assert rig.sent == []
    assert rig.sender.publication(0) is None
    assert rig.sender.poll() is SenderState.OPEN
    event.done.set()
    assert not rig.sender.look_ready()
    assert positions(rig) == [(0, 2)]
    assert rig.sender.poll() is SenderState.PUBLISHED


def test_a_reader_that_subscribes_meanwhile_is_not_told_either() -> None:
    rig = Rig()
    rig.sender.publish([3], ready=Event())
    rig.subscribe(1)
    assert rig.take(Ready) == []
    (said,) = rig.take(Subscribed)
    assert said.next_sequence == 0


def test_an_event_that_is_done_already_waits_for_nobody(rig: Rig) -> None:
    event = Event()
    event.done.set()
    rig.sender.publish([3], ready=event)
    assert positions(rig) == [(0, 1)]
    assert rig.waiting == []


def test_what_is_published_later_stays_behind(rig: Rig) -> None:
    first, done = Event(), Event()
    done.done.set()
    rig.sender.publish([3], ready=first)
    rig.sender.publish([4], ready=done)
    rig.sender.publish([5], last=True)
    assert rig.sender.look_ready()
    assert rig.sent == []
    first.done.set()
    assert not rig.sender.look_ready()
    assert positions(rig) == [(0, 1), (1, 2), (2, 3)]
    assert rig.sender.poll() is SenderState.PUBLISHED


def test_after_the_last_one_nothing_more_is_published_though_it_still_waits(rig: Rig) -> None:
    rig.sender.publish([3], ready=Event(), last=True)
    with pytest.raises(StateError, match="published to its end"):
        rig.sender.publish([4])


@pytest.mark.parametrize("when", ["at once", "later"])
def test_an_event_that_cannot_be_asked_fails_the_request_with_its_error(rig: Rig, when: str) -> None:
    event = Event()
    if when == "later":
        rig.sender.publish([3], ready=event)
    event.error = DeviceFailure("CUDA error: an illegal memory access was encountered")
    if when == "at once":
        rig.sender.publish([3], ready=event)
    assert not rig.sender.look_ready()
    assert rig.sender.poll() is SenderState.ABORTED
    (told,) = rig.take(Failed)
    assert told.cause.reason is FailureReason.BACKEND
    assert "DeviceFailure: CUDA error: an illegal memory access" in told.cause.text
    assert rig.take(Ready) == []


def test_pages_withdrawn_before_they_were_told_are_never_told(rig: Rig) -> None:
    event = Event()
    rig.sender.publish([3, 4], ready=event)
    rig.sender.withdraw([7])
    assert rig.sender.poll() is SenderState.OPEN
    rig.sender.withdraw([4])
    assert rig.sender.poll() is SenderState.ABORTED
    event.done.set()
    assert not rig.sender.look_ready()
    assert rig.take(Ready) == []
    assert rig.take(Failed)[0].cause.reason is FailureReason.GENERATION


def test_an_event_that_is_never_done_costs_a_lease(rig: Rig) -> None:
    rig.sender.publish([3], ready=Event())
    rig.now += LEASE_S
    rig.subscribe(1)
    rig.sender.expire(rig.now)
    assert rig.sender.poll() is SenderState.OPEN
    rig.sender.expire(rig.now + 1)
    assert rig.sender.poll() is SenderState.EXPIRED
    assert "the device has not written" in rig.take(Failed)[0].cause.text
    assert not rig.sender.look_ready()


class Machine(RuleBasedStateMachine):
    """Publishing in any order of events: readers hear of positions in their order, and of none before its event."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig()
        self.events: list[Event | None] = []
        self.told = 0

    @initialize()
    def begin(self) -> None:
        self.rig.subscribe(1)
        self.rig.sent.clear()

    @precondition(lambda self: len(self.events) < NUM_PAGES)
    @rule(waits=st.booleans())
    def publish(self, waits: bool) -> None:
        event = Event() if waits else None
        self.events.append(event)
        self.rig.sender.publish([len(self.events) - 1], ready=event)

    @precondition(lambda self: self.events)
    @rule(which=st.integers(0, 15))
    def finish(self, which: int) -> None:
        if event := self.events[which % len(self.events)]:
            event.done.set()

    @rule()
    def look(self) -> None:
        assert self.rig.sender.look_ready() == (self.num_done < len(self.events))

    @property
    def num_done(self) -> int:
        return sum(1 for _ in itertools.takewhile(lambda one: one is None or one.done.is_set(), self.events))

    @invariant()
    def nothing_is_told_before_it_is_done(self) -> None:
        for start, stop in positions(self.rig):
            assert (start, stop) == (self.told, self.told + 1)
            self.told = stop
        assert self.told <= self.num_done

    def teardown(self) -> None:
        for event in self.events:
            if event:
                event.done.set()
        assert not self.rig.sender.look_ready()
        self.nothing_is_told_before_it_is_done()
        assert self.told == len(self.events)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


# --- the thread that looks ----------------------------------------------------------------------------


@dataclass(eq=False)
class Waiting:
    """A request that waits for an event, as the watch sees it."""

    event: Event = field(default_factory=Event)
    looked: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    over: threading.Event = field(default_factory=threading.Event)
    failed: list[Failure] = field(default_factory=list)

    def look_ready(self) -> bool:
        self.looked.release()
        done = self.event.query()
        if done:
            self.over.set()
        return not done

    def fail(self, cause: Failure) -> None:
        self.failed.append(cause)
        self.over.set()


def test_the_watch_looks_again_and_again_until_nothing_waits() -> None:
    watch, waiting = ReadyWatch("w0"), Waiting()
    try:
        watch.add(waiting)
        for _ in range(5):
            assert waiting.looked.acquire(timeout=60)
        assert not waiting.over.is_set()
        waiting.event.done.set()
        assert waiting.over.wait(60)
        again = Waiting()
        again.event.done.set()
        watch.add(again)
        assert again.over.wait(60)
    finally:
        watch.close()
        watch.close()


def test_a_bug_in_one_request_fails_it_and_others_are_looked_at_still() -> None:
    watch, broken, other = ReadyWatch("w0"), Waiting(), Waiting()
    broken.event.error = ValueError("a bug")
    try:
        watch.add(broken)
        assert broken.over.wait(60)
        assert "ValueError: a bug" in broken.failed[0].text
        other.event.done.set()
        watch.add(other)
        assert other.over.wait(60)
    finally:
        watch.close()


def test_a_closed_watch_looks_at_nothing() -> None:
    watch, waiting = ReadyWatch("w0"), Waiting()
    watch.add(waiting)
    assert waiting.looked.acquire(timeout=60)
    watch.close()
    while waiting.looked.acquire(blocking=False):
        pass
    watch.add(Waiting())
    watch.add(waiting)
    assert not waiting.looked.acquire(timeout=0.01)
