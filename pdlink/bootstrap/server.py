"""Owns the running bootstrap server: its socket, its thread and event loop, lease expiry, health and reflection.

What the RPCs do is `service`'s, and what is registered is `directory`'s.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdlink.address import Address, advertised
from pdlink.bootstrap.arrivals import Arrivals, CallWatch
from pdlink.bootstrap.directory import Directory
from pdlink.bootstrap.gate import OpenGate, TokenGate
from pdlink.bootstrap.inspection_wire import SERVICE as INSPECTOR
from pdlink.bootstrap.renewed import Renewed
from pdlink.bootstrap.rpc import SERVER_OPTIONS, SERVICE
from pdlink.bootstrap.service import BootstrapService
from pdlink.bootstrap.tls import read_server
from pdlink.bootstrap.token import TokenDoor
from pdlink.config import PREFIX, Settings
from pdlink.denials import Denials
from pdlink.errors import ConfigError, DeadlineExceeded, InvalidInput, PartDead
from pdlink.events import Events
from pdlink.threads import Death, SupervisedThread

log = logging.getLogger("pdlink.bootstrap")
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 10.0
STOP_GRACE_S = 0.2
EXPIRY_INTERVAL_S = 0.25
ASK_TIMEOUT_S = 4.0
NO_CALL = "no call after a TLS handshake"
NO_CALL_TEXT = (
    "a connection that came to no call: TLS refused it (no certificate, an expired one, another CA's, plain text; with "
    "GRPC_VERBOSITY=INFO in its environment this service prints which), or it refused us, or was a probe of the port"
)
MAX_CONCURRENT_RPCS = 16_384


class BootstrapServer:
    """A bootstrap service on a thread of its own. Use `start`; `close` may be called twice and from any thread."""

    def __init__(self, bind: Address, settings: Settings, clock: Callable[[], float], events: Events) -> None:
        self._bind = bind
        self._advertise_host = settings.advertise_host
        self._clock = clock
        # Versions start at the time of day, so that those of a restarted service are newer too.
        directory = Directory(settings.registration_lease_s, time.time_ns(), settings.max_registrations)
        self._denials = Denials("bootstrap.denied", events)
        self._door = TokenDoor(settings)
        self._arrivals = Arrivals(time.monotonic)
        self._credentials = _credentials(settings, self._arrivals)
        self._service = BootstrapService(directory, clock, events, self._denials, self._name)
        self._events = events
        self._started: Future[int] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = SupervisedThread(
            self._run,
            f"pdlink-bootstrap-{bind}",
            f"bootstrap {bind}",
            events=events,
            on_death=self._not_started,
            was_asked=lambda: self._is_stopping or not self._has_started,
        )
        self._is_stopping = False
        self._has_started = False
        self._exit_error: BaseException | None = None
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

        Raises `InvalidInput` for an address that is in use or not this machine's, `AddressError` for a wildcard without
        `advertise_host`, and `ConfigError` for credentials that cannot be used or protect nothing.
        """
        settings = settings or Settings()
        advertised(address, settings.advertise_host)  # refused before anything is bound
        _check_no_plain_token(address, settings)
        server = cls(address, settings, clock, events or Events())
        server._thread.start()
        try:
            port = server._started.result(START_TIMEOUT_S)
        except TimeoutError:
            server.close()
            raise DeadlineExceeded(f"bootstrap at {address} did not start within {START_TIMEOUT_S:g} s") from None
        server.address = advertised(Address(address.host, port), settings.advertise_host)
        if address.is_loopback or settings.is_secured:
            log.info("bootstrap serves at %s: %s", server.address, _manner(settings))
        else:
            text = "bootstrap serves at %s: %s: whoever reaches it may register ranks and learn of others; set %s"
            log.warning(text, server.address, _manner(settings), f"{PREFIX}TOKEN_FILE and {PREFIX}TLS_CERTIFICATE")
        return server

    @property
    def num_workers(self) -> int:
        """How many workers are registered, over all instances."""
        return self._service.num_workers

    def readiness(self, timeout_s: float = ASK_TIMEOUT_S) -> Mapping[str, str]:
        """Every registered instance, and what keeps it from being whole ("": nothing). Any thread but the serving one.

        Raises `PartDead` where that has ended, and `DeadlineExceeded`.
        """
        loop = self._loop
        if loop is None or not self.is_alive:
            raise PartDead(f"{self._name()} does not serve: {self.death.text if self.death else 'it was closed'}")

        async def ask() -> Mapping[str, str]:
            return self._service.readiness()

        asked = asyncio.run_coroutine_threadsafe(ask(), loop)
        try:
            return asked.result(timeout_s)
        except TimeoutError:
            asked.cancel()
            raise DeadlineExceeded(f"{self._name()} has not answered for {timeout_s:g} s") from None

    def _name(self) -> str:
        """What the log calls this service; the port is known once it is bound."""
        return f"bootstrap {self.address}"

    @property
    def denials(self) -> Mapping[str, int]:
        """How many calls were refused, by reason: no or a wrong token, somebody else's registration."""
        return self._denials.counts

    @property
    def is_alive(self) -> bool:
        """Whether the serving thread runs; its death is also logged and emitted as `thread.died`. Callers of gRPC's
        health service hear NOT_SERVING first."""
        return self._thread.is_alive

    @property
    def death(self) -> Death | None:
        """How the serving thread ended, where that was not `close`."""
        return self._thread.death

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the serving thread to end; whether it has."""
        return self._thread.join(timeout_s)

    def close(self) -> None:
        """Stop serving: calls under way get a moment, watches end. Registrations are forgotten."""
        self._is_stopping = True
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None and self._thread.is_alive:
            try:
                loop.call_soon_threadsafe(stop.set)
            except RuntimeError:
                log.debug("bootstrap loop has ended already")
        self._thread.join(STOP_TIMEOUT_S)

    def __enter__(self) -> BootstrapServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except InvalidInput as error:
            if self._has_started:
                raise
            self._started.set_exception(error)

    def _not_started(self, death: Death) -> None:
        """Whoever waits for the start must not wait for its time limit."""
        if not self._started.done():
            self._started.set_exception(death.error)

    def _exit(self, error: BaseException) -> None:
        """End with what a handler raised, in order: raised through the event loop it would cut off every call."""
        self._exit_error = self._exit_error or error
        if self._stop:
            self._stop.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._service.on_exit = self._exit
        guards: list[grpc.aio.ServerInterceptor] = [CallWatch(self._arrivals)] if self._credentials else []
        is_open = self._door.is_open
        guards.append(OpenGate(self._name) if is_open else TokenGate(self._door, self._denials, self._name))
        server = grpc.aio.server(
            interceptors=guards,
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS,
        )
        server.add_generic_rpc_handlers((self._service.handlers(), self._service.inspector()))
        healthy = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
        served = (SERVICE, INSPECTOR, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(served, server)
        port = _bind(server, self._bind, self._credentials)
        await server.start()
        for name in ("", SERVICE):
            await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._has_started = True
        self._started.set_result(port)
        try:
            while not self._stop.is_set():
                self._service.expire()
                for _ in range(self._arrivals.take_lost()):
                    self._denials.add(self._name(), "", NO_CALL, NO_CALL_TEXT)
                await _wait_for(self._stop, EXPIRY_INTERVAL_S)
            if self._exit_error:
                raise self._exit_error
        finally:
            await healthy.enter_graceful_shutdown()
            self._service.end_watches()
            await server.stop(STOP_GRACE_S)


def _credentials(settings: Settings, arrivals: Arrivals) -> grpc.ServerCredentials | None:
    """TLS as the files have it at each new connection, or None for plain text. Raises `ConfigError`."""
    if read_server(settings) is None:
        return None
    mutual = settings.tls_client_auth == "require"

    def configure() -> grpc.ServerCertificateConfiguration:
        files = read_server(settings)
        pair = files.pair if files else None
        assert files is not None
        assert pair is not None
        return grpc.ssl_server_certificate_configuration([pair], files.ca if mutual else None)

    kept = Renewed((settings.tls_certificate, settings.tls_key, settings.tls_ca), configure)
    used = [kept.get()]

    def renew() -> grpc.ServerCertificateConfiguration | None:
        """gRPC asks with each connection that begins; None: as before."""
        arrivals.begin()
        before, used[0] = used[0], kept.get()
        return None if used[0] is before else used[0]

    fetch = cast(
        Callable[[], grpc.ServerCertificateConfiguration], renew
    )  # its stub does not know that None is allowed
    return grpc.dynamic_ssl_server_credentials(used[0], fetch, require_client_authentication=mutual)


def _manner(settings: Settings) -> str:
    """How it serves, for the log."""
    tls = settings.tls_certificate is not None
    manner = (
        "plain text" if not tls else "TLS" if settings.tls_client_auth == "none" else "TLS with client certificates"
    )
    has_token = settings.token is not None or settings.token_file is not None
    return f"{manner}, {'a token' if has_token else 'no token'}"


def _check_no_plain_token(address: Address, settings: Settings) -> None:
    is_plain = settings.tls_certificate is None and settings.tls_ca is None
    has_token = settings.token is not None or settings.token_file is not None
    if is_plain and has_token and not address.is_loopback and not settings.allow_plaintext_secrets:
        raise ConfigError(
            f"callers would send the token to {address} in plain text, for everyone on the way to read; set "
            f"{PREFIX}TLS_CERTIFICATE and {PREFIX}TLS_KEY, or, on a network that you trust, "
            f"{PREFIX}ALLOW_PLAINTEXT_SECRETS=1"
        )


def _bind(server: grpc.aio.Server, address: Address, credentials: grpc.ServerCredentials | None) -> int:
    try:
        place = str(address)
        port = server.add_secure_port(place, credentials) if credentials else server.add_insecure_port(place)
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
