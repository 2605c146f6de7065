"""Owns the HTTP side of a server: an aiohttp application on a thread and an event loop of its own.

What is served besides `/healthz` and `/readyz` is passed in. It has no TLS and no passwords: it is for the network that
a test rig has to itself, and binds the one address that it is given.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from pdlink.address import Address
from pdlink.errors import ConfigError, DeadlineExceeded
from pdlink.threads import SupervisedThread

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
SHUTDOWN_S = 1.0
"""For answers that are under way when the server ends: whoever waits for one has been told by then."""
MAX_BODY_BYTES = 1 << 20
MAX_ID_CHARS = 200
MAX_PROMPT_CHARS = 200_000

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Ready = Callable[[], str]


class HttpThread:
    """Serves until `close`, which may be called twice.

    `routes` are "METHOD /path" and their handlers. `unready` says what keeps this process from serving, "" for nothing;
    it is called on the event loop, so that it must be quick.
    """

    def __init__(self, address: Address, routes: Mapping[str, Handler], unready: Ready) -> None:
        """Raises `ConfigError` for an address that cannot be bound."""
        self._address = address
        self._routes = dict(routes)
        self._unready = unready
        self._started = threading.Event()
        self._error: OSError | None = None
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._is_stopping = False
        name = f"serve-http-{address.port}"
        self._thread = SupervisedThread(self._run, name, "http", was_asked=lambda: self._is_stopping)
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            raise DeadlineExceeded(f"the HTTP server at {address} did not start within {START_TIMEOUT_S:g} s")
        if self._error is not None:
            raise ConfigError(f"--http {address} cannot be bound: {self._error.strerror or self._error}")

    def close(self) -> None:
        if self._is_stopping:
            return
        self._is_stopping = True
        if self._thread.is_alive:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        add_probes(app, self._unready)
        for what, handler in self._routes.items():
            method, _, path = what.partition(" ")
            app.router.add_route(method, path, handler)
        # A caller that leaves is noticed: what it asked for is ended.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._address.host, self._address.port, reuse_address=True).start()
        except OSError as error:
            self._error, self._is_stopping = error, True
        self._started.set()
        if self._error is None:
            await self._stop.wait()
        await runner.cleanup()


def add_probes(app: web.Application, unready: Ready) -> None:
    """`/healthz`, which answers while the process does, and `/readyz`."""

    async def healthz(request: web.Request) -> web.Response:
        return web.json_response({"ok": True})

    async def readyz(request: web.Request) -> web.Response:
        reason = unready()
        return web.json_response({"ok": not reason, "reason": reason}, status=503 if reason else 200)

    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)


def refuse(status: int, text: str, *, retry: bool) -> web.Response:
    """An error as servers and front say it to each other; `retry`: the same request may do elsewhere, or later."""
    return web.json_response({"event": "error", "text": text, "retry": retry}, status=status)
