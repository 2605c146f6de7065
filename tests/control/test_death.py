"""A control loop that dies tells its part of the process at once, and its peers with its last frames."""

import logging
import os
import time

import pytest

from pdlink.address import Address
from pdlink.control.loop import ControlLoop
from pdlink.errors import PartDead
from pdlink.events import Events
from pdlink.health import Health
from tests.control.loops import ANY, TIMEOUT_S, Box, flush, ping, stranger
from tests.processes import wait_until


def raiser(error):
    def call():
        raise error

    return call


def join(loop):
    assert loop._thread.join(TIMEOUT_S)


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()], ids=lambda one: repr(one))
@pytest.mark.parametrize("where", ["call", "timer", "handler"])
def test_a_loop_that_dies_is_red_and_refuses_what_comes_after(error, where, caplog):
    events, seen = Events(), Box()
    health = Health(events)
    events.subscribe(seen)
    loop = ControlLoop(events=events).start()
    loop.on_death(raiser(SystemExit(2)))  # one that fails must not keep the next from being told
    mourned = Box()
    loop.on_death(lambda death: mourned(death))
    server = loop.bind(ANY, lambda route, frame: raiser(error)())
    peer = loop.connect(server.address, Box())
    if where == "call":
        loop.call_soon(raiser(error))
    elif where == "timer":
        loop.call_later(0.0, raiser(error))
    else:
        peer.send(ping(1))
    join(loop)
    (death,) = mourned.take()
    assert death.error is error
    assert not loop.is_alive
    assert loop.death is death
    assert seen.take()[0].name == "thread.died"
    assert seen.is_empty
    assert health.report().parts == {"control loop": death.text}
    assert len([one for one in caplog.records if one.levelno == logging.CRITICAL]) == 1
    assert not loop.call_soon(raiser(error))
    for call in (loop.start, lambda: loop.bind(ANY, Box()), lambda: loop.connect(Address("127.0.0.1", 1), Box())):
        with pytest.raises(PartDead, match="thread pdlink-control of control loop died"):
            call()
    server.send(b"r", ping(1))
    peer.send(ping(1))
    loop.close()
    loop.close()


def test_the_last_words_of_a_loop_reach_its_peers():
    other, heard = ControlLoop().start(), Box()
    inbox = Box()
    loop = ControlLoop().start()
    server = loop.bind(ANY, inbox)
    channel = other.connect(server.address, heard)
    channel.send(ping(1))
    route, _ = inbox.take()
    loop.on_death(lambda death: [server.send(route, ping(number)) for number in range(100)])
    loop.call_soon(raiser(SystemExit(1)))
    assert [heard.take()[0] for _ in range(100)] == [ping(number) for number in range(100)]
    join(loop)
    loop.close()
    other.close()


def test_what_was_handed_over_before_the_death_has_its_turn():
    loop, ran = ControlLoop(), []
    for call in (raiser(SystemExit(1)), lambda: ran.append(1), raiser(SystemExit(2)), lambda: ran.append(2)):
        assert loop.call_soon(call)
    loop.start()
    join(loop)
    assert ran == [1, 2]
    loop.close()


def test_a_loop_that_died_leaves_no_descriptor_and_gives_its_port_back():
    def cycle():
        loop = ControlLoop().start()
        server = loop.bind(ANY, Box())
        for _ in range(4):
            loop.connect(server.address, Box()).send(ping(1))
        loop.call_soon(raiser(SystemExit(1)))
        join(loop)
        loop.close()

    cycle()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(4):
        cycle()
    assert wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_malformed_frames_are_all_counted_and_logged_once_in_a_while(caplog):
    loop = ControlLoop().start()
    server = loop.bind(ANY, Box())
    with stranger(server.address) as socket:
        for _ in range(200):
            socket.send(b"\xff" * 64)
        give_up = time.monotonic() + TIMEOUT_S
        while loop.counters.malformed < 200 and time.monotonic() < give_up:
            flush(loop)
    assert loop.counters.malformed == 200
    assert 1 <= sum("malformed" in one.message for one in caplog.records) < 20
    loop.close()
