"""Threads of the sglang plug-in that die say so at once, and callers beyond a bound are hung up on."""

from __future__ import annotations

import logging
import socket
import threading
from typing import Any

import pytest

from pdlink.address import Address
from pdlink.transfer.failure import Failure, FailureReason
from pdlink_engines.sglang import http_answers, shared_port
from pdlink_engines.sglang.http_answers import HttpAnswers, PrefillFacts
from pdlink_engines.sglang.publisher import NUM_THREADS, Publisher, PublishJob
from pdlink_engines.sglang.shared_port import SharedPort

WAIT_S = 60.0
LOOPBACK = Address("127.0.0.1", 0)


class Killed(BaseException):
    """No `Exception`: no boundary but a thread's own catches it."""


def kill(*arguments: object) -> Any:
    raise Killed("for the test")


def leave(*arguments: object) -> Any:
    raise SystemExit("for the test")


def deaths(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.message for one in caplog.records if one.levelno == logging.CRITICAL]


def is_hung_up(caller: socket.socket) -> bool:
    """Whether the other end ends a connection without a word."""
    try:
        return caller.recv(1) == b""
    except ConnectionResetError:
        return True


class Never:
    def query(self) -> bool:
        return False


def test_a_publishing_thread_that_dies_fails_its_requests_and_later_ones(caplog) -> None:
    told, failures = [], []
    publisher = Publisher(60.0, told.append)
    orders = [publisher.order() for _ in range(NUM_THREADS)]
    lane = orders[0].lane
    other = next(order for order in iter(publisher.order, None) if order.lane is lane)
    failed = threading.Semaphore(0)

    def fail(failure: Failure) -> None:
        failures.append(failure)
        failed.release()

    publisher.submit(other, PublishJob(Never(), kill, fail))
    publisher.submit(orders[0], PublishJob(None, kill, fail))
    assert failed.acquire(timeout=WAIT_S)
    assert failed.acquire(timeout=WAIT_S)
    publisher.submit(other, PublishJob(None, kill, fail))
    assert [one.reason for one in failures] == [FailureReason.INTERNAL] * 3
    assert {one.text for one in failures} == set(deaths(caplog)) == {told[0].text}
    published = threading.Event()
    publisher.submit(orders[1], PublishJob(None, published.set, fail))
    assert published.wait(WAIT_S)
    publisher.close()
    publisher.close()
    assert len(told) == 1


def test_a_shared_port_whose_loop_dies_hangs_up_on_everyone_and_gives_the_port_back(caplog, monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as behind:
        inner = Address("127.0.0.1", behind.getsockname()[1])
        port = SharedPort(LOOPBACK, inner, inner)
        with socket.create_connection(("127.0.0.1", port.port), WAIT_S) as first:
            first.sendall(b"GET / HTTP/1.1\r\n")
            accepted, _ = behind.accept()
            monkeypatch.setattr(SharedPort, "_has_room", leave)  # asyncio itself deals with everything else
            with socket.create_connection(("127.0.0.1", port.port), WAIT_S):
                assert port._thread.join(WAIT_S)
            first.settimeout(WAIT_S)
            assert is_hung_up(first)
            accepted.close()
    assert deaths(caplog) == [port._thread.death.text]
    port.close()
    port.close()
    with socket.create_server(("127.0.0.1", port.port)):
        pass


def test_callers_of_one_host_beyond_its_share_are_hung_up_on_and_counted(caplog, monkeypatch) -> None:
    monkeypatch.setattr(shared_port, "MAX_CALLERS_OF_HOST", 3)
    with socket.create_server(("127.0.0.1", 0)) as behind:
        inner = Address("127.0.0.1", behind.getsockname()[1])
        port = SharedPort(LOOPBACK, inner, inner)
        place = ("127.0.0.1", port.port)
        callers = [socket.create_connection(place, WAIT_S) for _ in range(3)]
        ends = []
        for caller in callers:
            caller.sendall(b"GET ")
            ends.append(behind.accept()[0])
        for _ in range(2):
            with socket.create_connection(place, WAIT_S) as refused:
                assert is_hung_up(refused)
        assert port.num_refused == 2
        assert len([one for one in caplog.records if "refuses 127.0.0.1" in one.message]) == 1
        assert ends[0].recv(4) == b"GET "
        port.close()
        for one in (*callers, *ends):
            one.close()


def test_an_http_server_whose_thread_dies_is_logged_and_closes(caplog, monkeypatch) -> None:
    monkeypatch.setattr(http_answers._Server, "service_actions", kill)
    answers = HttpAnswers(PrefillFacts(1, True), lambda: None)
    assert answers._thread.join(WAIT_S)
    assert deaths(caplog) == [answers._thread.death.text]
    answers.close()
    answers.close()
    with socket.create_server(("127.0.0.1", answers.address.port)):
        pass


def test_an_http_server_refuses_connections_beyond_its_bound(monkeypatch) -> None:
    monkeypatch.setattr(http_answers, "MAX_CONNECTIONS", 2)
    answers = HttpAnswers(PrefillFacts(1, True), lambda: None)
    place = ("127.0.0.1", answers.address.port)
    held = [socket.create_connection(place, WAIT_S) for _ in range(2)]
    for one in held:
        one.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert one.recv(1 << 10).startswith(b"HTTP/1.1 200")
    with socket.create_connection(place, WAIT_S) as refused:
        assert is_hung_up(refused)
    for one in held:
        one.close()
    answers.close()
