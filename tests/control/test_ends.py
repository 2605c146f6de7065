import os
import socket
import threading
import time

import pytest

from pdlink.address import Address
from pdlink.control.loop import ControlLoop
from pdlink.errors import FrameError, InvalidInput, StateError
from tests.control.loops import ANY, TIMEOUT_S, Box, flush, passes, ping
from tests.processes import wait_until


def test_a_port_in_use_is_refused_with_the_address(loop):
    server = loop.bind(ANY, Box())
    with pytest.raises(InvalidInput, match=f"cannot listen on {server.address}"):
        loop.bind(server.address, Box())
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = Address("127.0.0.1", other.getsockname()[1])
        with pytest.raises(InvalidInput, match=f"cannot listen on {taken}.*choose another"):
            loop.bind(taken, Box())
    assert loop.is_alive


@pytest.mark.parametrize("port", [0, 4242])
def test_an_address_of_another_host_is_refused(loop, port):
    with pytest.raises(InvalidInput, match=r"cannot listen on 192\.0\.2\.1"):
        loop.bind(Address("192.0.2.1", port), Box())


def test_a_frame_that_cannot_be_encoded_is_the_senders_error(loop):
    server = loop.bind(ANY, Box())
    channel = loop.connect(server.address, Box())
    for send in (channel.send, lambda frame: server.send(b"r", frame)):
        with pytest.raises(FrameError):
            send(ping(1 << 64))


def test_a_closed_server_gives_its_port_back_and_closing_twice_is_fine(loop):
    server = loop.bind(ANY, Box())
    server.close()
    server.close()
    flush(loop)
    other = ControlLoop().start()
    try:
        bind_when_free(other, server.address)
    finally:
        other.close()


def bind_when_free(loop: ControlLoop, address: Address) -> None:
    """zmq closes a socket on a thread of its own, so the port comes back a moment after the loop has let go of it."""
    give_up = time.monotonic() + TIMEOUT_S
    while True:
        try:
            loop.bind(address, Box())
            return
        except InvalidInput:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.01)


def test_a_closed_channel_hears_no_more(loop):
    inbox, outbox = Box(), Box()
    server = loop.bind(ANY, inbox)
    channel = loop.connect(server.address, outbox)
    channel.send(ping(1))
    route, _ = inbox.take()
    channel.close()
    channel.close()
    flush(loop)
    server.send(route, ping(2))
    flush(loop)
    channel.send(ping(3))
    flush(loop)
    assert loop.is_alive
    assert outbox.is_empty


def test_what_was_handed_over_before_close_is_run():
    loop, ran = ControlLoop().start(), []
    busy, go_on = Box(), threading.Event()

    def wait():
        busy(threading.current_thread())
        assert go_on.wait(TIMEOUT_S)

    loop.call_soon(wait)
    (io,) = busy.take()
    for number in range(100):
        loop.call_soon(lambda number=number: ran.append(number))
    loop.close(timeout_s=0.0)
    assert not loop.is_alive
    go_on.set()
    io.join(TIMEOUT_S)
    assert ran == list(range(100))


def test_a_closed_loop_refuses_sockets_and_drops_calls():
    loop = ControlLoop().start()
    loop.close()
    loop.close()
    assert not loop.is_alive
    ran = []
    loop.call_soon(lambda: ran.append(1))
    loop.call_later(0, lambda: ran.append(1))
    for call in (loop.start, lambda: loop.bind(ANY, Box()), lambda: loop.connect(Address("127.0.0.1", 1), Box())):
        with pytest.raises(StateError, match="closed"):
            call()
    assert ran == []


def test_a_loop_with_sockets_that_never_started_closes():
    loop = ControlLoop()
    server = loop.bind(ANY, Box())
    loop.connect(server.address, Box()).send(ping(1))
    loop.close()
    loop.close()


def test_a_loop_closes_right_after_a_socket_was_made():
    for _ in range(20):
        loop = ControlLoop().start()
        loop.connect(loop.bind(ANY, Box()).address, Box()).send(ping(1))
        loop.close()
        assert not loop.is_alive


def test_a_loop_may_be_closed_by_its_own_thread():
    loop, closed = ControlLoop().start(), threading.Event()
    thread = Box()
    server = loop.bind(ANY, Box())

    def close():
        thread(threading.current_thread())
        loop.close()
        closed.set()

    loop.call_soon(close)
    assert closed.wait(TIMEOUT_S)
    (io,) = thread.take()
    io.join(TIMEOUT_S)
    assert not io.is_alive()
    with socket.socket() as other:
        other.bind((server.address.host, server.address.port))


def test_loops_leave_no_descriptors_behind():
    def cycle():
        loop, inbox, outbox = ControlLoop().start(), Box(), Box()
        server = loop.bind(ANY, inbox)
        channels = [loop.connect(server.address, outbox) for _ in range(4)]
        for channel in channels:
            assert passes(server, inbox, channel, 1)
        channels[0].close()
        loop.close()

    cycle()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(8):
        cycle()
    assert wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_loop_can_hold_a_channel_for_each_rank_of_a_large_instance(loop):
    channels = [loop.connect(Address("127.0.0.1", 9), Box()) for _ in range(1100)]
    for channel in channels:
        channel.close()
    flush(loop)
    assert loop.is_alive
