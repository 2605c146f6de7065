"""Owns the running bootstrap server: its socket, its thread and event loop, lease expiry, health and reflection.

What the RPCs do is `service`'s, and what is registered is `directory`'s.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdlink.address import Address, advertised
from pdlink.bootstrap.directory import Directory
from pdlink.bootstrap.rpc import SERVER_OPTIONS, SERVICE
from pdlink.bootstrap.service import BootstrapService
from pdlink.config import Settings
from pdlink.errors import DeadlineExceeded, InvalidInput
from pdlink.events import Events

log = logging.getLogger("pdlink.bootstrap")
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 10.0
STOP_GRACE_S = 0.2
EXPIRY_INTERVAL_S = 0.25
MAX_CONCURRENT_RPCS = 16_384


class BootstrapServer:
    """A bootstrap service on a thread of its own. Use `start`; `close` may be called twice and from any thread."""

    def __init__(self, bind: Address, settings: Settings, clock: Callable[[], float], events: Events) -> None:
        self._bind = bind
        self._advertise_host = settings.advertise_host
        self._clock = clock
        # Versions start at the time of day, so that those of a restarted service are newer too.
        directory = Directory(settings.registration_lease_s, first_version=time.time_ns())
        self._service = BootstrapService(directory, clock, events)
        self._events = events
        self._started: Future[int] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name=f"pdlink-bootstrap-{bind}", daemon=True)
        self.address = bind

    @classmethod
    def start(
        cls,
        address: Address,
        settings: Settings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        events: Events | None = None,
    ) -> BootstrapServer:
        """Bind `address` (port 0: any free one) and serve; `.address` is what peers are told.

        Raises `InvalidInput` for an address that is in use or not this machine's, and `AddressError` for a wildcard
        without `advertise_host`.
        """
        settings = settings or Settings()
        advertised(address, settings.advertise_host)  # refused before anything is bound
        server = cls(address, settings, clock, events or Events())
        server._thread.start()
        try:
            port = server._started.result(START_TIMEOUT_S)
        except TimeoutError:
            server.close()
            raise DeadlineExceeded(f"bootstrap at {address} did not start within {START_TIMEOUT_S:g} s") from None
        server.address = advertised(Address(address.host, port), settings.advertise_host)
        log.info("bootstrap serves at %s", server.address)
        return server

    @property
    def is_alive(self) -> bool:
        """Whether the serving thread runs; its death is also logged and emitted as `bootstrap.died`."""
        return self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the serving thread to end; whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Stop serving: calls under way get a moment, watches end. Registrations are forgotten."""
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None and self._thread.is_alive():
            try:
                loop.call_soon_threadsafe(stop.set)
            except RuntimeError:
                log.debug("bootstrap loop has ended already")
        if self._thread is not threading.current_thread():
            self._thread.join(STOP_TIMEOUT_S)

    def __enter__(self) -> BootstrapServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except InvalidInput as error:
            self._started.set_exception(error)
        except Exception as error:
            if not self._started.done():
                self._started.set_exception(error)
                return
            log.exception("bootstrap at %s died", self.address)
            self._events.emit("bootstrap.died", address=str(self.address), error=str(error))

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS)
        server.add_generic_rpc_handlers((self._service.handlers(),))
        healthy = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        port = _bind(server, self._bind)
        await server.start()
        for name in ("", SERVICE):
            await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._started.set_result(port)
        try:
            while not self._stop.is_set():
                self._service.expire()
                await _wait_for(self._stop, EXPIRY_INTERVAL_S)
        finally:
            await healthy.enter_graceful_shutdown()
            self._service.end_watches()
            await server.stop(STOP_GRACE_S)


def _bind(server: grpc.aio.Server, address: Address) -> int:
    try:
        port = server.add_insecure_port(str(address))
    except RuntimeError as error:  # its text is about gRPC's own debugging
        raise _cannot_bind(address) from error
    if port == 0:
        raise _cannot_bind(address)
    return port


def _cannot_bind(address: Address) -> InvalidInput:
    return InvalidInput(f"bootstrap cannot listen at {address}: {_why_not(address)}; give another address")


def _why_not(address: Address) -> str:
    """The reason in the words of the operating system, which gRPC keeps to itself."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
            probe.listen()
    except OSError as error:  # an unknown host too
        return error.strerror or str(error)
    return "the port was taken for a moment"


async def _wait_for(event: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return
