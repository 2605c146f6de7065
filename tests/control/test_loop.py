import random
import socket
import sys
import threading
import time

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from pdlink.address import Address
from pdlink.control.loop import ControlLoop
from pdlink.control.wire import encode
from tests.control.frames import FRAMES
from tests.control.loops import ANY, TIMEOUT_S, Box, flush, passes, ping, reaches, stranger
from tests.ports import held_port


def test_frames_go_both_ways_unchanged_and_in_order(loop):
    inbox, outbox = Box(), Box()
    server = loop.bind(ANY, inbox)
    channel = loop.connect(server.address, outbox)
    for frame in FRAMES.values():
        channel.send(frame)
    for frame in FRAMES.values():
        route, found = inbox.take()
        assert found == frame
        server.send(route, frame)
    assert [outbox.take() for _ in FRAMES] == [(frame,) for frame in FRAMES.values()]
    flush(loop)
    assert (loop.counters.sent, loop.counters.received) == (2 * len(FRAMES), 2 * len(FRAMES))
    assert (loop.counters.malformed, loop.counters.dropped, loop.counters.handler_errors) == (0, 0, 0)


def test_frames_that_are_sent_together_arrive_one_by_one_in_their_order(loop):
    inbox = Box()
    channel = loop.connect(loop.bind(ANY, inbox).address, Box())
    channel.send(*(ping(nonce) for nonce in range(5)))
    assert [inbox.take()[1] for _ in range(5)] == [ping(nonce) for nonce in range(5)]
    flush(loop)
    assert loop.counters.sent == 5


def test_an_answer_leaves_before_its_handler_does_anything_else(loop):
    other, outbox, may_end = ControlLoop().start(), Box(), threading.Event()

    def answer(route, frame):
        server.send(route, frame)
        may_end.wait(2 * TIMEOUT_S)

    try:
        server = other.bind(ANY, answer)
        loop.connect(server.address, outbox).send(ping(1))
        assert outbox.take() == (ping(1),)
    finally:
        may_end.set()
        other.close()


def test_what_another_thread_has_sent_leaves_before_what_a_call_sends_later(loop):
    inbox, has_begun, may_send = Box(), threading.Event(), threading.Event()
    channel = loop.connect(loop.bind(ANY, inbox).address, Box())

    def send_later():
        has_begun.set()
        may_send.wait(TIMEOUT_S)
        channel.send(ping(2))

    loop.call_soon(send_later)
    assert has_begun.wait(TIMEOUT_S)
    channel.send(ping(1))
    may_send.set()
    assert [inbox.take()[1] for _ in range(2)] == [ping(1), ping(2)]


def test_each_channel_gets_its_own_answers(loop):
    inbox, boxes = Box(), [Box() for _ in range(8)]
    server = loop.bind(ANY, inbox)
    for nonce, box in enumerate(boxes):
        loop.connect(server.address, box).send(ping(nonce))
    for _ in boxes:
        route, frame = inbox.take()
        server.send(route, frame)
    assert [box.take() for box in boxes] == [(ping(nonce),) for nonce in range(8)]
    assert all(box.is_empty for box in boxes)


def test_two_processes_worth_of_loops_reach_each_other(loop):
    other, inbox, outbox = ControlLoop().start(), Box(), Box()
    try:
        server = other.bind(ANY, inbox)
        channel = loop.connect(server.address, outbox)
        assert passes(server, inbox, channel, 5)
        assert outbox.take() == (ping(6),)
    finally:
        other.close()


def test_a_channel_reaches_a_server_that_starts_after_it_and_again_after_a_restart(loop):
    with held_port() as port:
        channel = loop.connect(Address("127.0.0.1", port), Box())
        for nonce in (1, 2):
            other, inbox = ControlLoop().start(), Box()
            try:
                server = other.bind(Address("127.0.0.1", port), inbox)
                assert server.address.port == port
                assert reaches(server, inbox, channel, nonce)
            finally:
                other.close()


# --- strangers ----------------------------------------------------------------------------------

RANDOM = random.Random(5)
GARBAGE = [[b""], [RANDOM.randbytes(1024)], [b"a", b"b"], [b"", b"", b""], [b"x" * 4096]]


def test_garbage_is_counted_and_the_next_good_frame_passes(loop, heard):
    inbox, outbox = Box(), Box()
    server = loop.bind(ANY, inbox)
    channel = loop.connect(server.address, outbox)
    with stranger(server.address) as bad:
        for parts in GARBAGE:
            bad.send_multipart(parts)
        assert [heard.take() for _ in GARBAGE] == [("control.malformed",)] * len(GARBAGE)
    assert passes(server, inbox, channel, 1)
    assert outbox.take() == (ping(2),)
    assert inbox.is_empty
    assert loop.is_alive
    assert loop.counters.malformed == len(GARBAGE)
    assert loop.counters.handler_errors == 0


def test_a_client_survives_a_server_that_answers_garbage(loop, heard):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as bad:
        port = bad.bind_to_random_port("tcp://127.0.0.1")
        box = Box()
        channel = loop.connect(Address("127.0.0.1", port), box)
        channel.send(ping(1))
        assert bad.poll(TIMEOUT_S * 1000)
        route, _ = bad.recv_multipart()
        for parts in GARBAGE:
            bad.send_multipart([route, *parts])
        assert [heard.take() for _ in GARBAGE] == [("control.malformed",)] * len(GARBAGE)
        bad.send_multipart([route, encode(ping(7))])
        assert box.take() == (ping(7),)
    assert loop.is_alive


def test_a_message_over_the_limit_never_arrives_and_breaks_only_its_own_connection(loop):
    inbox, outbox = Box(), Box()
    server = loop.bind(ANY, inbox)
    channel = loop.connect(server.address, outbox)
    assert passes(server, inbox, channel, 1)
    with stranger(server.address) as bad, bad.get_monitor_socket(zmq.EVENT_DISCONNECTED) as watch:
        bad.send(bytes(8 << 20))
        assert watch.poll(TIMEOUT_S * 1000)
        assert recv_monitor_message(watch)["event"] == zmq.EVENT_DISCONNECTED
        bad.disable_monitor()
    assert passes(server, inbox, channel, 3)
    assert [outbox.take() for _ in range(2)] == [(ping(2),), (ping(4),)]
    assert inbox.is_empty
    assert (loop.counters.received, loop.counters.malformed) == (4, 0)


@pytest.mark.parametrize("text", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(100), RANDOM.randbytes(1024)])
def test_a_peer_that_does_not_speak_zmq_harms_nobody(loop, text):
    inbox, outbox = Box(), Box()
    server = loop.bind(ANY, inbox)
    with socket.create_connection((server.address.host, server.address.port), TIMEOUT_S) as bad:
        bad.sendall(text)
        assert passes(server, inbox, loop.connect(server.address, outbox), 1)
    assert outbox.take() == (ping(2),)
    assert loop.is_alive


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.PUB, zmq.PUSH, zmq.ROUTER])
def test_a_socket_of_another_kind_harms_nobody(loop, kind):
    inbox = Box()
    server = loop.bind(ANY, inbox)
    with stranger(server.address, kind) as bad:
        if kind == zmq.REQ:
            bad.send(encode(ping(7)))
        assert passes(server, inbox, loop.connect(server.address, Box()), 1)
    assert loop.is_alive


def test_an_answer_to_nobody_is_dropped_and_counted(loop):
    server = loop.bind(ANY, Box())
    server.send(b"nobody", ping(1))
    flush(loop)
    assert (loop.counters.dropped, loop.counters.sent) == (1, 0)
    assert loop.is_alive


def _breaking(call, broken):
    def break_one(socket, *arguments, **options):
        if socket is broken:
            raise zmq.ZMQError(zmq.ENOTSOCK)
        return call(socket, *arguments, **options)

    return break_one


def test_a_socket_that_breaks_is_closed_and_the_others_go_on(loop, monkeypatch):
    broken_box, good_box = Box(), Box()
    broken, good = loop.bind(ANY, broken_box), loop.bind(ANY, good_box)
    flush(loop)
    for name in ("recv_multipart", "send_multipart", "getsockopt", "disable_monitor"):
        monkeypatch.setattr(zmq.Socket, name, _breaking(getattr(zmq.Socket, name), broken._socket))
    loop.connect(broken.address, Box()).send(ping(1))
    assert passes(good, good_box, loop.connect(good.address, Box()), 2)
    while not broken._socket.closed:
        flush(loop)
    assert passes(good, good_box, loop.connect(good.address, Box()), 4)
    assert broken_box.is_empty
    assert loop.counters.handler_errors == 1
    assert loop.is_alive


def test_an_answer_to_a_channel_that_the_thread_does_not_know_yet_is_not_lost(loop):
    other, outbox, is_busy, may_go = ControlLoop().start(), Box(), threading.Event(), threading.Event()
    try:
        server = other.bind(ANY, lambda route, frame: server.send(route, frame))
        loop.call_soon(lambda: (is_busy.set(), may_go.wait(TIMEOUT_S)))
        is_busy.wait(TIMEOUT_S)
        channel = loop.connect(server.address, outbox)
        channel.send(ping(1))
        time.sleep(0.3)  # until its answer is there, which the next use of the socket takes note of
        channel.send(ping(2))
        may_go.set()
        assert [outbox.take() for _ in range(2)] == [(ping(1),), (ping(2),)]
    finally:
        may_go.set()
        other.close()


def test_nobody_who_sends_waits_while_a_dying_loop_says_goodbye(monkeypatch):
    monkeypatch.setattr("pdlink.control.loop.GOODBYE_MS", 20_000)
    loop, is_closing = ControlLoop().start(), threading.Event()
    with held_port() as nobody:
        channel = loop.connect(Address("127.0.0.1", nobody), Box())
        channel.send(ping(1))
        destroy = loop._sockets._context.destroy
        monkeypatch.setattr(
            loop._sockets._context, "destroy", lambda linger: (is_closing.set(), destroy(linger=linger))
        )
        loop.call_soon(sys.exit)
        assert is_closing.wait(TIMEOUT_S)
        sending = threading.Thread(target=channel.send, args=(ping(2),))
        sending.start()
        sending.join(10)
        assert not sending.is_alive()
        assert loop.counters.dropped == 1


def _two_peers(loop):
    heard, outboxes, routes = Box(), [Box(), Box()], []
    server = loop.bind(ANY, heard)
    for outbox in outboxes:
        loop.connect(server.address, outbox).send(ping(1))
        routes.append(heard.take()[0])
    return server, outboxes, routes


def _raise_interrupt():
    raise KeyboardInterrupt


def _interrupt_after(monkeypatch, part, handler):
    """Call `handler` once, right after `part` of a message was handed to zmq, as Python does with a signal's."""
    whole = zmq.Socket.send

    def interrupted(socket, data, *arguments, **options):
        whole(socket, data, *arguments, **options)
        if data == part:
            monkeypatch.undo()
            handler()

    monkeypatch.setattr(zmq.Socket, "send", interrupted)


def test_a_signal_that_interrupts_a_message_does_not_mix_it_with_the_next(loop, monkeypatch):
    server, outboxes, routes = _two_peers(loop)
    _interrupt_after(monkeypatch, routes[0], _raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        server.send(routes[0], ping(2))
    server.send(routes[1], ping(3))
    server.send(routes[0], ping(4))
    assert outboxes[1].take() == (ping(3),)
    assert outboxes[0].take() == (ping(4),)
    flush(loop)
    assert loop.counters.malformed == 1


def test_a_signals_handler_that_sends_in_the_middle_of_a_send_mixes_nothing_and_waits_for_nothing(loop, monkeypatch):
    server, outboxes, routes = _two_peers(loop)
    _interrupt_after(monkeypatch, routes[0], lambda: server.send(routes[1], ping(3)))
    sending = threading.Thread(target=server.send, args=(routes[0], ping(2)))
    sending.start()
    sending.join(TIMEOUT_S)
    assert not sending.is_alive()
    assert [outbox.take() for outbox in outboxes] == [(ping(2),), (ping(3),)]
    flush(loop)
    assert loop.counters.malformed == 0


@pytest.mark.parametrize("sender", ["another thread", "a call"])
def test_a_frame_that_came_right_before_another_was_sent_waits_for_nothing(loop, monkeypatch, sender):
    """Whoever uses a socket takes in the news that frames have come; the thread that reads them must hear of it."""
    monkeypatch.setattr("pdlink.control.loop.LONGEST_WAIT_S", 10 * TIMEOUT_S)
    other = ControlLoop().start()
    try:
        inbox, outbox, is_busy, may_go = Box(), Box(), threading.Event(), threading.Event()
        server = other.bind(ANY, inbox)
        channel = loop.connect(server.address, outbox)
        channel.send(ping(1))
        route, _ = inbox.take()
        flush(loop)

        def keep_busy():
            is_busy.set()
            may_go.wait(TIMEOUT_S)
            if sender == "a call":
                channel.send(ping(3))

        loop.call_soon(keep_busy)
        is_busy.wait(TIMEOUT_S)
        server.send(route, ping(2))
        time.sleep(0.3)  # until it has come; nothing tells of that
        if sender == "another thread":
            channel.send(ping(3))
        may_go.set()
        assert outbox.take() == (ping(2),)
        assert inbox.take()[1] == ping(3)
    finally:
        may_go.set()
        other.close()


def test_frames_of_many_threads_at_once_all_arrive(monkeypatch):
    monkeypatch.setattr("pdlink.control.loop.LONGEST_WAIT_S", 10 * TIMEOUT_S)
    num_threads, num_frames = 3, 400
    here, there = ControlLoop(max_queued_frames=10**6).start(), ControlLoop(max_queued_frames=10**6).start()
    try:
        heard, outbox = Box(), Box()
        aside = here.connect(there.bind(ANY, heard).address, Box())
        server = there.bind(ANY, lambda route, frame: (server.send(route, frame), heard(route, frame)))
        channel = here.connect(server.address, lambda frame: (aside.send(frame), outbox(frame)))
        channel.send(ping(1))
        route, _ = heard.take()

        def flood(send):
            for nonce in range(num_frames):
                send(ping(nonce + 2))

        sending = [channel.send] * num_threads + [lambda frame: server.send(route, frame)] * num_threads
        threads = [threading.Thread(target=flood, args=(send,)) for send in sending]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        one_way = num_threads * num_frames
        for _ in range(1 + 2 * one_way):  # echoes of what went there, and what was sent from there unasked
            outbox.take()
        for _ in range(one_way + 1 + 2 * one_way):  # what went there, and what its echoes sent aside
            heard.take()
        assert (here.counters.dropped, there.counters.dropped) == (0, 0)
    finally:
        here.close()
        there.close()
