"""The HTTP server: what it answers, where it may listen, and what callers can do to it."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from pdlink.address import Address
from pdlink.errors import ConfigError
from pdlink.events import Events
from pdlink.observability import http
from pdlink.observability.http import Answer, HttpServer

PATIENCE_S = 30.0


def ask(address: Address, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://{address}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def scrape(accept: str) -> tuple[bytes, str]:
    return b"m 1\n", "text/plain"


def broken() -> Answer:
    raise ZeroDivisionError("oh")


@pytest.fixture
def server() -> Iterator[HttpServer]:
    probes = {
        "/healthz": lambda: Answer(True, (), {"a": ""}),
        "/readyz": lambda: Answer(False, ("b is away",), {"a": "", "b": "away"}),
        "/broken": broken,
    }
    with HttpServer("127.0.0.1:0", probes, scrape, Events()) as server:
        yield server


def test_a_probe_is_200_or_503_with_its_reasons(server: HttpServer) -> None:
    status, body = ask(server.address, "/healthz")
    assert (status, json.loads(body)) == (200, {"ok": True, "reasons": [], "parts": {"a": ""}})
    status, body = ask(server.address, "/readyz")
    assert status == 503
    assert json.loads(body) == {"ok": False, "reasons": ["b is away"], "parts": {"a": "", "b": "away"}}


def test_metrics_are_served_as_they_are(server: HttpServer) -> None:
    assert ask(server.address, "/metrics") == (200, "m 1\n")
    assert ask(server.address, "/metrics", "HEAD") == (200, "")


def test_other_paths_and_methods_are_refused(server: HttpServer) -> None:
    assert ask(server.address, "/")[0] == 404
    assert ask(server.address, "/metrics/x")[0] == 404
    assert ask(server.address, "/healthz", "POST")[0] == 405


def test_a_probe_that_raises_is_500_without_its_text_and_ends_nothing(server: HttpServer) -> None:
    status, body = ask(server.address, "/broken")
    assert status == 500
    assert "oh" not in body
    assert ask(server.address, "/healthz")[0] == 200


def test_a_caller_that_says_nothing_holds_up_nobody(server: HttpServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(http.MAX_CALLERS - 2):
            stack.enter_context(socket.create_connection((server.address.host, server.address.port)))
        assert ask(server.address, "/healthz")[0] == 200


def test_callers_past_the_bound_are_hung_up_on_and_later_ones_served(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = (server.address.host, server.address.port)
    with contextlib.ExitStack() as stack:
        callers = [stack.enter_context(socket.create_connection(place)) for _ in range(http.MAX_CALLERS + 1)]
        callers[-1].settimeout(PATIENCE_S)
        assert callers[-1].recv(1) == b""
    over = threading.Event()
    for _ in range(int(PATIENCE_S / 0.05)):
        with contextlib.suppress(OSError):
            assert ask(server.address, "/healthz")[0] == 200
            break
        over.wait(0.05)
    else:
        pytest.fail("nobody was served any more")


def test_a_server_that_is_closed_gives_its_port_back() -> None:
    first = HttpServer("127.0.0.1:0", {}, scrape, Events())
    address = first.address
    first.close()
    first.close()
    assert not first.is_alive
    with HttpServer(str(address), {}, scrape, Events()) as second:
        assert second.address == address


def test_processes_that_share_a_range_take_one_port_each() -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(HttpServer("127.0.0.1:0", {}, scrape, Events()))
        port = first.address.port
        text = f"127.0.0.1:{port}-{min(port + 40, 65535)}"
        second = stack.enter_context(HttpServer(text, {}, scrape, Events()))
        assert second.address.port > port
        with pytest.raises(ConfigError, match=f"PDLINK_HTTP_BIND=127.0.0.1:{port} cannot be bound: .* a range"):
            HttpServer(str(first.address), {}, scrape, Events())
        with pytest.raises(ConfigError, match="Address already in use"):
            HttpServer(f"127.0.0.1:{port}-{port}", {}, scrape, Events())


WILDCARD = ".".join("0000")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{WILDCARD}:9400", "every interface"),
        (f"{WILDCARD}:9400-9410", "every interface"),
        ("127.0.0.1", "has no port"),
        ("127.0.0.1:94000", "outside 0..65535"),
        ("127.0.0.1:9400-94000", "outside 0..65535"),
        ("127.0.0.1:9400-9300", "ends before it begins"),
        ("192.0.2.7:9400", "cannot be bound"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"PDLINK_HTTP_BIND={text}.*{said}"):
        HttpServer(text, {}, scrape, Events())
