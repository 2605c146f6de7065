import threading
import weakref

import pytest

from pdlink.control.loop import ControlLoop
from tests.control.loops import ANY, Box, flush, passes, ping, stranger


def test_a_handler_that_raises_is_counted_and_the_thread_lives_on(loop, heard):
    inbox = Box()

    def handler(route, frame):
        inbox(route, frame)
        if frame == ping(1):
            raise RuntimeError("no")

    server = loop.bind(ANY, handler)
    channel = loop.connect(server.address, Box())
    channel.send(ping(1))
    inbox.take()
    assert heard.take() == ("control.handler_error",)
    assert passes(server, inbox, channel, 3)
    assert (loop.counters.handler_errors, loop.counters.malformed) == (1, 0)


def test_a_call_or_timer_that_raises_does_not_end_the_thread(loop, heard):
    def broken():
        raise ValueError("no")

    loop.call_soon(broken)
    loop.call_later(0.0, broken)
    assert [heard.take() for _ in range(2)] == [("control.handler_error",)] * 2
    flush(loop)
    assert loop.counters.handler_errors == 2


def test_a_listener_that_raises_does_not_end_the_thread(loop):
    box = Box()

    def broken(event):
        box(event.name)
        raise RuntimeError("no")

    loop.events.subscribe(broken)
    server = loop.bind(ANY, Box())
    with stranger(server.address) as bad:
        bad.send(b"")
        assert box.take() == ("control.malformed",)
    flush(loop)
    assert loop.is_alive


def test_calls_run_on_the_one_io_thread_in_the_order_in_which_they_came(loop):
    ran = []
    for number in range(100):
        loop.call_soon(lambda number=number: ran.append((number, threading.current_thread())))
    flush(loop)
    assert [number for number, _ in ran] == list(range(100))
    assert {thread.name for _, thread in ran} == {"pdlink-control"}


def test_calls_that_ask_for_more_calls_do_not_starve_the_sockets(loop):
    inbox, arrived = Box(), threading.Event()
    server = loop.bind(ANY, lambda route, frame: (inbox(route, frame), arrived.set()))

    def again():
        if not arrived.is_set():
            loop.call_soon(again)

    loop.call_soon(again)
    assert passes(server, inbox, loop.connect(server.address, Box()), 1)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def timed():
    """A loop whose time stands still until the test moves it."""
    clock = Clock()
    made = ControlLoop(clock=clock).start()
    yield made, clock
    made.close()


def test_timers_fire_when_due_in_order_of_their_time_and_then_of_their_making(timed):
    loop, clock = timed
    ran = []
    for delay, name in ((3, "c"), (1, "a"), (2, "b"), (3, "d")):
        loop.call_later(delay, lambda name=name: ran.append(name))
    flush(loop)
    assert ran == []
    clock.now += 2
    flush(loop)
    flush(loop)
    assert ran == ["a", "b"]
    clock.now += 1
    flush(loop)
    flush(loop)
    assert ran == ["a", "b", "c", "d"]


def test_a_cancelled_timer_never_fires_and_lets_go_of_what_it_held(timed):
    loop, clock = timed
    ran = []

    class Held:
        def call(self):
            ran.append("held")

    held = Held()
    gone = weakref.ref(held)
    timer = loop.call_later(5, held.call)
    loop.call_later(5, lambda: ran.append("other"))
    flush(loop)
    timer.cancel()
    timer.cancel()
    del held
    assert gone() is None
    clock.now += 5
    flush(loop)
    flush(loop)
    assert ran == ["other"]


def test_a_timer_that_sets_itself_again_lets_others_run(timed):
    loop, _ = timed
    ran = []

    def again():
        ran.append(1)
        loop.call_later(0, again)

    loop.call_later(0, again)
    for _ in range(3):
        flush(loop)
    assert loop.is_alive
    assert ran
