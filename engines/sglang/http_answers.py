"""Owns what a prefill server answers over HTTP on its bootstrap port: sglang's own questions, and where it is served
by pdlink. It registers no rank and knows no layer; that is the gRPC directory's, on the same port.

sglang asks for `/health` (routers, other backends' heartbeats), and for the DP rank of a room (`/register_dp_rank` by
prefill, `/query_dp_ranks` by decode). A peer without the plug-in asks for `/route` and is refused by name. `/pdlink` is
ours: it says that pdlink serves here, whether all ranks are registered, and what decode's scheduler must know.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from pdlink.address import Address
from pdlink.errors import InvalidInput
from pdlink.threads import SupervisedThread

log = logging.getLogger("pdlink.sglang")

FACTS_PATH = "/pdlink"
ROOM_TTL_S = 120.0
MAX_ROOMS = 1 << 17
MAX_NAMED = 1024
MAX_BODY_BYTES = 4 << 20
IDLE_TIMEOUT_S = 60.0
MAX_CONNECTIONS = 512
REFUSAL = (
    "this prefill server moves its KV cache with pdlink, and the peer that asks uses a transfer backend of sglang's "
    "own; start both servers with the same pdlink settings (--disaggregation-transfer-backend pdlink, or "
    "PDLINK_SGLANG_BACKEND_NAME alike)"
)


@dataclass(frozen=True, slots=True)
class PrefillFacts:
    """What decode's scheduler reads of a prefill server. `prefill_http_port` is that of its `/generate`."""

    dp_size: int
    follow_bootstrap_room: bool
    prefill_http_port: int | None = None

    def __post_init__(self) -> None:
        if self.dp_size < 1:
            raise InvalidInput(f"dp_size={self.dp_size} must be at least 1")


def pack_facts(facts: PrefillFacts) -> bytes:
    return json.dumps(asdict(facts)).encode()


def unpack_facts(data: bytes) -> PrefillFacts:
    """Raises `InvalidInput` for what `pack_facts` did not make; unknown fields of newer servers are left out."""
    try:
        told = json.loads(data)
        port = told.get("prefill_http_port")
        return PrefillFacts(
            int(told["dp_size"]), bool(told["follow_bootstrap_room"]), None if port is None else int(port)
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInput(f"its answer to {FACTS_PATH} cannot be read: {error}") from error


class RoomRanks:
    """Which DP rank serves which room, for `ROOM_TTL_S` after it was said and among the newest `MAX_ROOMS`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._ranks: dict[int, tuple[int, float]] = {}

    def put(self, room: int, dp_rank: int) -> None:
        now = self._clock()
        with self._lock:
            self._ranks.pop(room, None)
            self._ranks[room] = (dp_rank, now)
            while self._ranks:
                oldest = next(iter(self._ranks))
                if len(self._ranks) <= MAX_ROOMS and now - self._ranks[oldest][1] <= ROOM_TTL_S:
                    break
                del self._ranks[oldest]

    def find(self, rooms: list[int]) -> dict[str, int]:
        now = self._clock()
        with self._lock:
            known = {room: self._ranks[room] for room in rooms if room in self._ranks}
        return {str(room): rank for room, (rank, at) in known.items() if now - at <= ROOM_TTL_S}


class HttpAnswers:
    """The HTTP server, on a free loopback port of this machine (`address`). `close` twice is fine.

    `caller_of` may be set to who knows the host behind a caller's port, where something stands in between.
    """

    def __init__(self, facts: PrefillFacts, not_ready: Callable[[], str | None]) -> None:
        """`not_ready` says why decode must wait, or None. It is called on threads of this server."""
        rooms = RoomRanks()
        self.caller_of: Callable[[int], str | None] = lambda port: None

        class Handler(_Handler):
            known = (facts, not_ready, rooms)
            caller_of = staticmethod(lambda port: self.caller_of(port))
            refused: ClassVar[set[str]] = set()

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.address = Address("127.0.0.1", self._server.server_address[1])
        self._closing = False
        self._thread = SupervisedThread(
            self._server.serve_forever,
            "pdlink-http",
            "sglang bootstrap port",
            at_end=self._server.server_close,
            was_asked=lambda: self._closing,
        )
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        if self._thread.is_alive:
            self._server.shutdown()
            self._thread.join()


class _Server(ThreadingHTTPServer):
    """A thread for each connection, `MAX_CONNECTIONS` at once; who comes then is hung up on, and asks again."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            log.warning("bootstrap http: %d connections are open, another is refused", MAX_CONNECTIONS)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()


class _Handler(BaseHTTPRequestHandler):
    known: tuple[PrefillFacts, Callable[[], str | None], RoomRanks]
    caller_of: Callable[[int], str | None]
    refused: ClassVar[set[str]]
    """Hosts that use another backend and were named in the log."""
    protocol_version = "HTTP/1.1"
    timeout = IDLE_TIMEOUT_S

    def do_GET(self) -> None:
        facts, not_ready, _ = self.known
        path = self.path.partition("?")[0]
        if path == "/health":
            self._answer(HTTPStatus.OK, b"OK")
        elif path == FACTS_PATH:
            why = not_ready()
            if why:
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, why.encode())
            else:
                self._answer(HTTPStatus.OK, pack_facts(facts))
        else:
            self._answer_other(path)

    def do_PUT(self) -> None:
        self.close_connection = True  # what it carries is not read
        self._answer_other(self.path.partition("?")[0])

    def do_POST(self) -> None:
        _, _, rooms = self.known
        path = self.path.partition("?")[0]
        try:
            told = json.loads(self._body() or b"null")
            if path == "/register_dp_rank":
                rooms.put(int(told["bootstrap_room"]), int(told["dp_rank"]))
                self._answer(HTTPStatus.OK, b"OK")
            elif path == "/query_dp_ranks":
                found = rooms.find([int(room) for room in told["bootstrap_rooms"]])
                self._answer(HTTPStatus.OK, json.dumps(found).encode())
            else:
                self._answer_other(path)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self._answer(HTTPStatus.BAD_REQUEST, f"{path}: {error}".encode())

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("bootstrap http: " + format, *args)

    def _answer_other(self, path: str) -> None:
        if path == "/route":
            # Such a peer asks again and again, and is named once.
            host = self.caller_of(self.client_address[1]) or self.client_address[0]
            if host not in self.refused:
                if len(self.refused) < MAX_NAMED:
                    self.refused.add(host)
                log.error("bootstrap asked for /route by %s: %s", host, REFUSAL)
            self._answer(HTTPStatus.CONFLICT, REFUSAL.encode())
        else:
            self._answer(HTTPStatus.NOT_FOUND, f"no {path} here".encode())

    def _body(self) -> bytes:
        nbytes = int(self.headers.get("Content-Length") or 0)
        if not 0 <= nbytes <= MAX_BODY_BYTES:
            self.close_connection = True
            raise ValueError(f"a body of {nbytes} bytes is not read")
        return self.rfile.read(nbytes)

    def _answer(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json" if body[:1] == b"{" else "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
