"""What sglang decode knows of prefill servers, and what it asks of them: facts over HTTP, and computing again."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

from pdlink.address import Address
from pdlink_engines.sglang.http_answers import HttpAnswers, PrefillFacts
from pdlink_engines.sglang.prefill_servers import HTTP_THREADS, MAX_DOUBTFUL, REFUSAL_TTL_S, PrefillServers
from pdlink_engines.sglang.recompute import request_recompute

WAIT_S = 60.0


class Threads:
    """An executor whose work is done when told."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []

    def submit(self, call: Any, *arguments: Any) -> None:
        self.waiting.append(lambda: call(*arguments))

    def run(self) -> int:
        jobs, self.waiting = self.waiting, []
        for job in jobs:
            job()
        return len(jobs)


@pytest.fixture
def http() -> Iterator[HttpAnswers]:
    made = HttpAnswers(PrefillFacts(2, True, 30_000), lambda: None)
    yield made
    made.close()


def test_a_server_is_asked_once_and_away_from_the_caller(http: HttpAnswers) -> None:
    threads = Threads()
    servers = PrefillServers(threads, WAIT_S)
    address = str(http.address)
    assert not servers.look(address)
    assert not servers.look(address)
    assert servers.known == {}
    assert threads.run() == 1
    assert servers.look(address)
    assert servers.known[address] == PrefillFacts(2, True, 30_000)
    assert servers.refusal(address) is None
    servers.forget(address)
    assert not servers.look(address)


def test_a_server_that_is_not_there_is_asked_again_and_the_reason_said_once(caplog: pytest.LogCaptureFixture) -> None:
    threads = Threads()
    servers = PrefillServers(threads, WAIT_S)
    address = str(Address("127.0.0.1", 1))
    assert servers.trouble(address) is None
    for _ in range(3):
        assert not servers.look(address)
        assert threads.run() == 1
    assert servers.refusal(address) is None
    words = "prefill server 127.0.0.1:1 does not answer: .*refused; check bootstrap_host and bootstrap_port"
    assert re.match(words, str(servers.trouble(address)))
    assert [record.getMessage() for record in caplog.records] == [servers.trouble(address)]


def test_a_server_that_is_not_ready_says_what_is_missing_until_it_is() -> None:
    reasons: list[str | None] = ["1 of 2 prefill ranks have registered with pdlink"]
    answers = HttpAnswers(PrefillFacts(1, True), lambda: reasons[0])
    try:
        threads = Threads()
        servers = PrefillServers(threads, WAIT_S)
        address = str(answers.address)
        assert not servers.look(address)
        threads.run()
        assert "is not ready" in str(servers.trouble(address))
        assert "1 of 2" in str(servers.trouble(address))
        reasons[0] = None
        assert not servers.look(address)
        threads.run()
        assert servers.look(address)
        assert servers.trouble(address) is None
    finally:
        answers.close()


def test_servers_that_are_gone_leave_threads_to_the_others(http: HttpAnswers) -> None:
    threads = Threads()
    servers = PrefillServers(threads, WAIT_S)
    gone = [str(Address("127.0.0.1", port)) for port in range(1, MAX_DOUBTFUL + 3)]
    for address in gone:
        servers.look(address)
    threads.run()
    for address in gone:
        servers.look(address)
    assert len(threads.waiting) == MAX_DOUBTFUL < HTTP_THREADS
    assert not servers.look(str(http.address))
    assert len(threads.waiting) == MAX_DOUBTFUL + 1
    threads.run()
    assert servers.look(str(http.address))
    # Those that were left out have their turn.
    assert not servers.look(gone[-1])
    assert threads.run() == 1


def test_a_server_without_pdlink_is_refused_by_name_until_another_may_be_there(http: HttpAnswers) -> None:
    now, threads = [0.0], Threads()
    servers = PrefillServers(threads, WAIT_S, lambda: now[0])
    address = f"{http.address}/elsewhere"
    assert not servers.look(address)
    threads.run()
    assert servers.look(address)
    assert "does not run pdlink (it answered 404" in str(servers.refusal(address))
    now[0] = REFUSAL_TTL_S + 1
    assert not servers.look(address)
    assert servers.refusal(address) is None


def test_many_threads_may_look_at_once(http: HttpAnswers) -> None:
    with ThreadPoolExecutor(8) as threads:
        servers = PrefillServers(threads, WAIT_S)
        for looks in [threads.submit(servers.look, str(http.address)) for _ in range(32)]:
            looks.result(WAIT_S)
    assert servers.look(str(http.address))


@dataclass
class Retracted:
    bootstrap_addr: str
    reasons: list[str] = field(default_factory=list)

    def fail(self, reason: str) -> None:
        self.reasons.append(reason)


class Generate(BaseHTTPRequestHandler):
    """sglang's `/generate`; refuses requests of no tokens."""

    asked: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, payload))
        self.send_response(200 if payload["input_ids"] else 400)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def generate() -> Iterator[int]:
    Generate.asked.clear()
    server = HTTPServer(("127.0.0.1", 0), Generate)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join(WAIT_S)
    server.server_close()


def test_a_retracted_request_goes_to_generate_of_its_prefill_server(generate: int) -> None:
    receiver = Retracted("127.0.0.1:8998")
    known = {"127.0.0.1:8998": PrefillFacts(1, True, generate)}
    request_recompute(receiver, known, {"rid": "a", "input_ids": [1, 2]}, WAIT_S)
    assert Generate.asked == [("/generate", {"rid": "a", "input_ids": [1, 2]})]
    assert receiver.reasons == []


def test_a_request_that_cannot_be_computed_again_fails_with_the_reason(generate: int) -> None:
    receiver = Retracted("127.0.0.1:8998")
    request_recompute(receiver, {}, {"rid": "a"}, WAIT_S)
    known = {"127.0.0.1:8998": PrefillFacts(1, True, generate)}
    request_recompute(receiver, known, {"rid": "a", "input_ids": []}, WAIT_S)
    first, second = receiver.reasons
    assert "did not say where its /generate is" in first
    assert f"http://127.0.0.1:{generate}/generate did not recompute request a" in second
    assert "400" in second
