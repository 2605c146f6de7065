"""Owns the HTTP server of one process: probes such as `/healthz`, and `/metrics`. Whoever starts it says what they say.

It is the standard library's server for WSGI, on threads of its own: small, and for probes and scrapes only. It has no
passwords and no TLS, so that it binds the address that it was given and never every interface.
"""

from __future__ import annotations

import json
import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeAlias
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

from pdlink.address import Address, parse_address
from pdlink.errors import AddressError, ConfigError
from pdlink.events import Events
from pdlink.threads import SupervisedThread

log = logging.getLogger("pdlink.http")
PART = "http"
"""What its thread belongs to, by the name that health and logs know."""
REQUEST_TIMEOUT_S = 5.0
"""Of one read or write; a caller that takes longer is hung up on."""
MAX_CALLERS = 32
"""At once; further ones are hung up on."""
POLL_S = 0.2
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a probe is told: whether all is well, what is not, and each part by its name ("": well)."""

    ok: bool
    reasons: tuple[str, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)


Probe: TypeAlias = Callable[[], Answer]
Scrape: TypeAlias = Callable[[str], tuple[bytes, str]]


class HttpServer:
    """Serves until `close`, which may be called twice. `.address` is where.

    `probes` are paths and what they answer: 200 where that is well, else 503, both with the reasons in a JSON body.
    `scrape` takes what a scraper accepts, and gives the metrics and their content type.
    """

    def __init__(self, bind: str, probes: Mapping[str, Probe], scrape: Scrape, events: Events) -> None:
        """`bind` is `host:port`, or `host:first-last` for the first free port of these, so that several ranks of one
        machine may be given the same. Port 0 takes any. Raises `ConfigError` for an address that cannot be used."""
        self._probes = dict(probes)
        self._scrape = scrape
        self._server = _bind(bind)
        self._server.set_app(self._answer)
        host, port = self._server.server_address[:2]
        self.address = Address(str(host), int(port))
        self._is_stopping = False
        self._thread = SupervisedThread(
            self._run, f"pdlink-http-{port}", PART, events=events, was_asked=lambda: self._is_stopping
        )
        self._thread.start()
        log.info("%s, /metrics at http://%s", ", ".join(self._probes), self.address)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive

    def close(self) -> None:
        if self._is_stopping:
            return
        self._is_stopping = True
        if self._thread.is_alive:
            self._server.shutdown()
        self._thread.join(STOP_TIMEOUT_S)
        self._server.server_close()

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _run(self) -> None:
        self._server.serve_forever(POLL_S)

    def _answer(self, asked: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path, method = asked.get("PATH_INFO", ""), asked.get("REQUEST_METHOD", "")
        if method not in ("GET", "HEAD"):
            return _say(start, "405 Method Not Allowed", {"error": f"{method} is not served; use GET"})
        try:
            if path in self._probes:
                told = self._probes[path]()
                body = {"ok": told.ok, "reasons": list(told.reasons), "parts": dict(told.parts)}
                return _say(start, "200 OK" if told.ok else "503 Service Unavailable", body)
            if path == "/metrics":
                text, kind = self._scrape(asked.get("HTTP_ACCEPT", ""))
                start("200 OK", [("Content-Type", kind), ("Content-Length", str(len(text)))])
                return [text]
        except Exception:  # a caller must hear of a bug of ours, and the server must live on
            log.exception("GET %s failed", path)
            return _say(start, "500 Internal Server Error", {"error": "see the log of this process"})
        return _say(start, "404 Not Found", {"error": f"there is {', '.join(self._probes)} and /metrics"})


def _say(start: StartResponse, status: str, body: Mapping[str, object]) -> Iterable[bytes]:
    text = json.dumps(body).encode() + b"\n"
    start(status, [("Content-Type", "application/json"), ("Content-Length", str(len(text)))])
    return [text]


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s: " + format, self.address_string(), *args)


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: Address) -> None:
        self.address_family = socket.AF_INET6 if address.is_ipv6 else socket.AF_INET
        self._callers = threading.BoundedSemaphore(MAX_CALLERS)
        super().__init__((address.host, address.port), _Handler)

    def server_bind(self) -> None:
        """Without asking a name service for the name of this host, as the standard one does."""
        socketserver.TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), int(port)
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._callers.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread to be had
            self._callers.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._callers.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a caller left or said nothing", exc_info=True)


def try_bind(text: str) -> Address:
    """The address at which a server of `http_bind` would serve now. Raises `ConfigError` as that server does."""
    server = _bind(text)
    server.server_close()
    return Address(server.server_name, server.server_port)


def _bind(text: str) -> _Server:
    addresses = _addresses(text)
    for address in addresses:
        try:
            return _Server(address)
        except OSError as error:
            last = error
    why = last.strerror or str(last)
    more = f" (nor at any of the {len(addresses)} ports)" if len(addresses) > 1 else ""
    fix = "; where several processes of one machine share the setting, give a range: host:first-last"
    raise ConfigError(f"PDLINK_HTTP_BIND={text} cannot be bound: {why}{more}{fix if not more else ''}") from last


def _addresses(text: str) -> list[Address]:
    """The addresses to try in turn. Raises `ConfigError`."""
    first, dash, last = text.rpartition("-")
    is_range = bool(dash) and last.isdigit() and ":" in first
    try:
        start = parse_address(first if is_range else text)
        addresses = [start]
        if is_range:
            addresses = [Address(start.host, port) for port in range(start.port, int(last) + 1)]
    except AddressError as error:
        raise ConfigError(f"PDLINK_HTTP_BIND={text} cannot be used: {error}") from error
    if not addresses:
        raise ConfigError(f"PDLINK_HTTP_BIND={text} is a range that ends before it begins")
    if start.is_wildcard:
        raise ConfigError(
            f"PDLINK_HTTP_BIND={text} would serve on every interface, to whoever reaches this machine; name one address"
        )
    return addresses
