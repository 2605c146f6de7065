"""One port answers pdlink's gRPC callers and sglang's HTTP questions, and sends nobody to the wrong server."""

from __future__ import annotations

import contextlib
import gc
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdlink.address import Address
from pdlink.bootstrap.client import BootstrapClient
from pdlink.bootstrap.server import BootstrapServer
from pdlink.config import load_settings
from pdlink.errors import InvalidInput, UnknownInstance
from pdlink.layout import CacheLayout, fingerprint
from pdlink.layout.components import latent
from pdlink_engines.sglang.http_answers import (
    MAX_ROOMS,
    ROOM_TTL_S,
    HttpAnswers,
    PrefillFacts,
    RoomRanks,
    pack_facts,
    unpack_facts,
)
from pdlink_engines.sglang.shared_port import SharedPort
from tests.security.pki import Pki

LAYOUT = CacheLayout(2, (latent(64, range(2), bytes_per_token=1152),))
FACTS = PrefillFacts(4, False, 30_000)


@dataclass
class Served:
    port: int
    not_ready: str | None = None

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.port)

    def ask(self, path: str, body: object = None) -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(f"http://{self.address}{path}", data, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture
def served() -> Iterator[Served]:
    what = Served(0)
    directory = BootstrapServer.start(Address("127.0.0.1", 0))
    http = HttpAnswers(FACTS, lambda: what.not_ready)
    port = SharedPort(Address("127.0.0.1", 0), directory.address, http.address)
    http.caller_of = port.caller_of
    what.port = port.port
    yield what
    for one in (port, http, directory):
        one.close()
        one.close()


def test_grpc_over_tls_shares_the_port_too(tmp_path: Path) -> None:
    pki = Pki.make(tmp_path)
    served = load_settings({}, **pki.mutual_server, token="0123456789abcdef")
    asking = load_settings({}, **pki.mutual_client, token="0123456789abcdef")
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(BootstrapServer.start(Address("127.0.0.1", 0), served))
        http = HttpAnswers(FACTS, lambda: None)
        stack.callback(http.close)
        port = SharedPort(Address("127.0.0.1", 0), directory.address, http.address)
        stack.callback(port.close)
        client = stack.enter_context(BootstrapClient([Address("127.0.0.1", port.port)], asking))
        with pytest.raises(UnknownInstance, match="nobody has registered instance 'kv'"):
            client.resolve("kv", fingerprint(LAYOUT), 10.0)


def test_grpc_and_http_share_the_port(served: Served) -> None:
    with BootstrapClient([served.address]) as client:
        with pytest.raises(UnknownInstance, match="nobody has registered instance 'kv'"):
            client.resolve("kv", fingerprint(LAYOUT), 10.0)
        assert served.ask("/health") == (200, "OK")
        with pytest.raises(UnknownInstance):
            client.resolve("kv", fingerprint(LAYOUT), 10.0)


def test_the_facts_of_a_prefill_server_wait_until_its_ranks_are_there(served: Served) -> None:
    served.not_ready = "1 of 2 ranks"
    assert served.ask("/pdlink") == (503, "1 of 2 ranks")
    served.not_ready = None
    status, text = served.ask("/pdlink")
    assert (status, unpack_facts(text.encode())) == (200, FACTS)


def test_a_room_finds_its_dp_rank(served: Served) -> None:
    assert served.ask("/register_dp_rank", {"bootstrap_room": 17, "dp_rank": 3}) == (200, "OK")
    assert served.ask("/query_dp_ranks", {"bootstrap_rooms": [17, 18]}) == (200, '{"17": 3}')


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_a_peer_that_wants_sglangs_own_route_is_refused_by_name(served: Served, method: str) -> None:
    asked = urllib.request.Request(f"http://{served.address}/route?prefill_dp_rank=-1", b"{}", method=method)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(asked, timeout=10)
    with refused.value as answer:
        assert answer.code == 409
        assert b"moves its KV cache with pdlink" in answer.read()


@pytest.mark.parametrize(
    ("path", "body"),
    [("/register_dp_rank", {"bootstrap_room": "x"}), ("/query_dp_ranks", [1]), ("/query_dp_ranks", None)],
)
def test_a_question_that_cannot_be_read_is_answered_and_harms_nothing(served: Served, path: str, body: Any) -> None:
    assert served.ask(path, body if body is not None else {})[0] == 400
    assert served.ask("/health") == (200, "OK")


def test_callers_that_say_nothing_or_leave_harm_nobody(served: Served) -> None:
    silent = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(5)]
    for one, first in zip(silent, (b"", b"P", b"PRI ", b"GET /health HTT", b"\x00\x01\x02\x03"), strict=True):
        one.sendall(first)
    assert served.ask("/health") == (200, "OK")
    for one in silent:
        one.close()
    assert served.ask("/health") == (200, "OK")


def test_a_peer_without_pdlink_is_named_once_by_its_own_address(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    for source in ("127.0.0.2", "127.0.0.3", "127.0.0.2"):
        with socket.create_connection(("127.0.0.1", served.port), timeout=10, source_address=(source, 0)) as peer:
            peer.sendall(b"GET /route HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert b"409" in peer.recv(4096)
    named = [record.getMessage().split(":")[0] for record in caplog.records]
    assert named == [f"bootstrap asked for /route by 127.0.0.{number}" for number in (2, 3)]


def test_a_port_that_is_taken_is_refused(served: Served) -> None:
    with pytest.raises(InvalidInput, match="cannot listen"):
        SharedPort(served.address, served.address, served.address)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"dp_size": 0, "follow_bootstrap_room": true}', b"\xff"])
def test_facts_that_cannot_be_read_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        unpack_facts(data)


def test_facts_survive_the_wire() -> None:
    for facts in (FACTS, PrefillFacts(1, True, None)):
        assert unpack_facts(pack_facts(facts)) == facts


def test_rooms_are_forgotten_in_time_and_in_number() -> None:
    now = [0.0]
    rooms = RoomRanks(lambda: now[0])
    rooms.put(1, 5)
    now[0] = ROOM_TTL_S
    assert rooms.find([1]) == {"1": 5}
    now[0] = ROOM_TTL_S + 1
    assert rooms.find([1]) == {}
    for room in range(MAX_ROOMS + 1):
        rooms.put(10 + room, 0)
    assert rooms.find([10]) == {}
    assert rooms.find([11]) == {"11": 0}


def test_a_port_that_closes_on_its_callers_leaves_no_socket_open(caplog: pytest.LogCaptureFixture) -> None:
    """At whatever moment: a socket that is left is a warning, and that an error."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as behind:
        there = Address("127.0.0.1", behind.getsockname()[1])
        for round_number in range(40):
            port = SharedPort(Address("127.0.0.1", 0), there, there)
            callers = [socket.create_connection(("127.0.0.1", port.port)) for _ in range(round_number % 5)]
            for number, caller in enumerate(callers):
                caller.sendall(b"GET / HTTP/1.1\r\n\r\n"[: 2 + 16 * (number % 2)])
            port.close()
            for caller in callers:
                caller.close()
    gc.collect()
    assert caplog.records == []
