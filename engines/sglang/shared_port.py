"""Owns one TCP port on which two servers answer: gRPC callers reach one, HTTP/1 callers the other.

Which one a caller wants shows in its first bytes: gRPC begins with the HTTP/2 preface, or with TLS. What comes
after is passed on as it is. It speaks neither protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from concurrent.futures import Future

from pdlink.address import Address
from pdlink.errors import DeadlineExceeded, InvalidInput
from pdlink.threads import Death, SupervisedThread

log = logging.getLogger("pdlink.sglang")

PREFACE = b"PRI * HTTP/2.0"
HEAD_BYTES = 4
"""Enough to tell: no HTTP/1 method begins with `PRI `."""
TLS_HANDSHAKE = 0x16
"""First byte of a TLS connection. What is asked over HTTP here is plain, so that only gRPC comes that way."""
FIRST_BYTES_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
ABORT_INTERVAL_S = 0.05
CHUNK_BYTES = 64 << 10
MAX_CALLERS = 4096
"""Connections at once, each of which takes two open files here and one in the server behind."""
MAX_CALLERS_OF_HOST = 1024
"""Of them from one host, so that no host keeps the others out."""


class SharedPort:
    """Listens on `address` until `close`, which may be called twice. Connections run on one thread of its own.

    A caller beyond `MAX_CALLERS`, or `MAX_CALLERS_OF_HOST` of its host, is hung up on at once, counted and, once for
    each time that it begins, named in the log.
    """

    def __init__(self, address: Address, grpc: Address, http: Address) -> None:
        """Raises `InvalidInput` for an address that cannot be bound."""
        self._address, self._grpc, self._http = address, grpc, http
        self._callers: dict[int, str] = {}
        """Port of a connection to a server behind -> host that it is for."""
        self._open: set[asyncio.StreamWriter] = set()
        self._hosts: Counter[str] = Counter()
        """Host -> its connections."""
        self.num_refused = 0
        self._refusing: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started: Future[int] = Future()
        self._thread = SupervisedThread(
            self._run,
            f"pdlink-port-{address.port}",
            "sglang bootstrap port",
            on_death=self._not_started,
            at_end=self._loop.close,
            was_asked=lambda: self._stop.is_set() or self._started.exception() is not None,
        )
        self._thread.start()
        try:
            self.port = self._started.result(START_TIMEOUT_S)
        except TimeoutError:
            self.close()
            raise DeadlineExceeded(f"port {address} did not open within {START_TIMEOUT_S:g} s") from None

    def caller_of(self, port: int) -> str | None:
        """The host that a server behind hears through `port`. Any thread."""
        return self._callers.get(port)

    def close(self) -> None:
        """Stop listening and drop every connection."""
        if self._thread.is_alive:
            with contextlib.suppress(RuntimeError):  # it has just ended by itself
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        main = self._loop.create_task(self._serve())
        try:
            self._loop.run_until_complete(main)
        except OSError as error:
            if self._started.done():
                raise
            self._started.set_exception(
                InvalidInput(f"bootstrap cannot listen at {self._address}: {error.strerror or error}")
            )
        except BaseException:
            if not main.done():  # another task ended the loop: let go of the port and of every caller
                self._loop.call_soon(self._stop.set)
                self._loop.run_until_complete(main)
                self._stop.clear()
            raise

    def _not_started(self, death: Death) -> None:
        if not self._started.done():
            self._started.set_exception(death.error)

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._on_caller, self._address.host, self._address.port)
        self._started.set_result(server.sockets[0].getsockname()[1])
        await self._stop.wait()
        # asyncio never closes the socket of a connection that was accepted just before its server closed, or whose task
        # was cancelled before it began: accept nothing more, let each begin, then end them by their transports.
        for socket in server.sockets:
            self._loop.remove_reader(socket.fileno())
        await asyncio.sleep(0)
        server.close()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for one in self._open:
                one.transport.abort()
            await asyncio.wait(others, timeout=ABORT_INTERVAL_S)
        for one in self._open:  # of tasks that ended with the loop
            one.transport.abort()
        await asyncio.sleep(0)

    def _has_room(self, host: str) -> bool:
        if self._hosts.total() < MAX_CALLERS and self._hosts[host] < MAX_CALLERS_OF_HOST:
            return True
        self.num_refused += 1
        if host not in self._refusing and len(self._refusing) < MAX_CALLERS:
            self._refusing.add(host)
            log.warning(
                "bootstrap port %s refuses %s: it has %d connections of %d, and all hosts together %d of %d",
                self._address,
                host,
                self._hosts[host],
                MAX_CALLERS_OF_HOST,
                self._hosts.total(),
                MAX_CALLERS,
            )
        return False

    async def _on_caller(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one connection on to the server it wants, both ways, until both directions have ended."""
        self._open.add(writer)
        host = writer.get_extra_info("peername")[0]
        if not self._has_room(host):
            self._open.discard(writer)
            writer.transport.abort()
            return
        self._hosts[host] += 1
        behind: asyncio.StreamWriter | None = None
        own_port = 0
        try:
            async with asyncio.timeout(FIRST_BYTES_TIMEOUT_S):
                head = await reader.readexactly(HEAD_BYTES)
            is_grpc = PREFACE.startswith(head) or head[0] == TLS_HANDSHAKE
            wanted = self._grpc if is_grpc else self._http
            # Not `wait_for`, which loses a connection that is made in the moment in which this is cancelled.
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                answers, server = await asyncio.open_connection(wanted.host, wanted.port)
            behind = server
            self._open.add(server)
            own_port = server.get_extra_info("sockname")[1]
            self._callers[own_port] = host
            server.write(head)
            await asyncio.gather(_pass_on(reader, server), _pass_on(answers, writer))
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            log.debug("a caller of bootstrap port %s left", self._address)
        finally:
            self._hosts[host] -= 1
            if not self._hosts[host]:
                del self._hosts[host]
                self._refusing.discard(host)
            self._callers.pop(own_port, None)
            ends = {one for one in (writer, behind) if one is not None}
            self._open -= ends
            for one in ends:
                one.close()
            for one in ends:  # closed by the loop, which must not end before
                with contextlib.suppress(OSError):
                    await one.wait_closed()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
