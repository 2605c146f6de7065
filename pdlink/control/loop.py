"""Owns the I/O thread of a process: its timers, calls handed to it, and what becomes of frames that arrive. It knows no
request, and the sockets are in `sockets`.

Frames leave on the thread that sends them: an engine that has published keeps the GIL, and what had to be handed over
would wait for that. They arrive on the I/O thread, parsed; what cannot be parsed is counted and dropped. A handler that
raises is logged and counted, and the thread lives on; one that raises no mere `Exception` ends it, and then whoever
asked to be told is told, in time to say goodbye to its peers.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import zmq

from pdlink.address import Address
from pdlink.bootstrap.control_keys import ControlKeys
from pdlink.control.curve import ServerKeys, secure_client
from pdlink.control.frames import Frame
from pdlink.control.sentry import OnParts, Sentry
from pdlink.control.sockets import LoopCounters, Sockets
from pdlink.control.timers import Call, Timer, Timers
from pdlink.control.wire import decode, encode
from pdlink.errors import FrameError, InvalidInput, PartDead, StateError
from pdlink.events import Events
from pdlink.sparse_log import SparseLog
from pdlink.threads import Death, OnDeath, SupervisedThread

log = logging.getLogger("pdlink.control")

Clock: TypeAlias = Callable[[], float]
Route: TypeAlias = bytes
"""The identity of a DEALER as its ROUTER sees it; a reconnect changes it."""
ServerHandler: TypeAlias = Callable[[Route, Frame], None]
ClientHandler: TypeAlias = Callable[[Frame], None]

LONGEST_WAIT_S = 1.0
MAX_IN_A_ROW = 64
"""Frames that are read from one socket before others, and timers, have their turn."""
PART = "control loop"
MAX_REQUEST_BYTES = 1 << 20
"""Largest frame to a prefill rank: what decode says has no page lists, so that it is short."""
BACKLOG = 4096
"""Peers that may connect at once; the kernel's own limit (net.core.somaxconn) may be lower."""
GOODBYE_MS = 2000
"""How long a loop that dies waits at most for its last frames to leave: a busy machine needs a while, and a peer that
does not hear them waits for much longer."""


class ControlLoop:
    """One I/O thread. `start` before use; `close` twice is fine and waits for the thread."""

    def __init__(
        self,
        max_frame_bytes: int = 4 << 20,
        events: Events | None = None,
        clock: Clock = time.monotonic,
        max_queued_frames: int = 1000,
    ):
        """`max_queued_frames` wait for a peer, or come from it and wait here; what comes after that is dropped and
        counted, or stays with the peer."""
        self.clock = clock
        self.events = events or Events()
        self.counters = LoopCounters()
        self._max_frame_bytes = max_frame_bytes
        self._max_queued_frames = max_queued_frames
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sockets = Sockets(max_frame_bytes, max_queued_frames, self.counters, self._wake)
        self._calls: deque[Call] = deque()
        self._timers = Timers()
        self._handlers: dict[zmq.Socket[bytes], OnParts] = {}
        self._sentry = Sentry(self._open, self._add, self.events)
        self._woken = False
        """A wake-up is on its way; cleared after it was read and before the calls are run."""
        self._running = False
        self._closed = False
        self._lock = threading.RLock()
        """Handlers of signals may come in the middle of a call."""
        self._mourners: list[OnDeath] = []
        self._linger_ms = 0
        self._log = SparseLog(log, clock)
        self._thread = SupervisedThread(
            self._run,
            "pdlink-control",
            PART,
            events=self.events,
            on_death=self._die,
            at_end=self._release,
            was_asked=lambda: not self._running,
        )

    def start(self) -> ControlLoop:
        self._check_open()
        self._running = True
        self._thread.start()
        return self

    @property
    def is_alive(self) -> bool:
        return self._running and self._thread.is_alive

    @property
    def death(self) -> Death | None:
        """How the I/O thread ended, where that was not `close`. Nothing is sent or heard any more then."""
        return self._thread.death

    def on_death(self, told: OnDeath) -> None:
        """Have `told` called on the I/O thread when that dies. What it sends still goes out, if it can."""
        self._mourners.append(told)

    def call_soon(self, call: Call) -> bool:
        """Run `call` on the I/O thread. Any thread may ask; False, and it never runs, once the loop is closed or
        dead."""
        with self._lock:
            if self._closed:
                return False
            self._calls.append(call)
            # The I/O thread looks at its calls before it sleeps. Every write lets another thread take the GIL.
            if not self._woken and not self._thread.is_current:
                self._woken = True
                os.eventfd_write(self._wake, 1)
            return True

    def call_later(self, delay_s: float, call: Call) -> Timer:
        """Run `call` on the I/O thread after `delay_s`. Any thread may ask; `cancel()` the result to forget it."""
        timer = self._timers.make(self.clock() + delay_s, call)
        self.call_soon(lambda: self._timers.set(timer))
        return timer

    @property
    def denials(self) -> Mapping[str, int]:
        """Strangers that sockets with keys turned away, by reason."""
        return self._sentry.counts

    def bind(self, address: Address, handler: ServerHandler, keys: ServerKeys | None = None) -> Server:
        """Listen with a ROUTER at `address` (port 0: any); with `keys` only to readers that have theirs.

        Raises `InvalidInput` when the port is taken.
        """
        socket = self._open(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
        # Whoever connects may fill this queue: less of it, and of smaller frames, than a rank that was asked for.
        socket.setsockopt(zmq.RCVHWM, max(1, self._max_queued_frames // 4))
        socket.setsockopt(zmq.MAXMSGSIZE, min(self._max_frame_bytes, MAX_REQUEST_BYTES))
        host = f"[{address.host}]" if address.is_ipv6 else address.host
        if keys:
            self._sentry.guard(socket, keys)
        try:
            socket.bind(f"tcp://{host}:{address.port}")
            port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        except zmq.ZMQError as error:
            monitor = self._sentry.forget(socket)
            if monitor:
                self.call_soon(partial(self._remove, monitor))
            socket.close(0)
            raise InvalidInput(f"cannot listen on {address} for control frames: {error}; choose another") from error

        def on_parts(parts: list[bytes]) -> None:
            route, data = _parts(parts, 2)
            handler(route, self._parse(data))

        self._add(socket, on_parts)
        bound = Address(address.host, port)
        self._sentry.bound(socket, bound)
        return Server(self, socket, bound)

    def connect(self, address: Address, handler: ClientHandler, keys: ControlKeys | None = None) -> Channel:
        """Talk to a ROUTER at `address` with a DEALER; with `keys` only to the one that they are of.

        Connects and reconnects in the background; never blocks.
        """
        socket = self._open(zmq.DEALER)
        if keys:
            secure_client(socket, keys)
        socket.connect(f"tcp://{address}")

        def on_parts(parts: list[bytes]) -> None:
            (data,) = _parts(parts, 1)
            handler(self._parse(data))

        self._add(socket, on_parts)
        return Channel(self, socket, address)

    def close(self, timeout_s: float = 5.0) -> None:
        """Run what was handed over before, then end the thread and close every socket. Twice is fine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._running = False
            os.eventfd_write(self._wake, 1)
        if not self._thread.has_started:
            self._release()
        else:
            self._thread.join(timeout_s)

    # --- used by Server and Channel ---------------------------------------------------------------

    def _send(self, socket: zmq.Socket[bytes], messages: Sequence[list[bytes]]) -> None:
        """From any thread, in the order of calls. It never blocks."""
        if self._sockets.is_sending:
            self.call_soon(partial(self._send, socket, messages))
        elif self._sockets.send(socket, messages) and not self._thread.is_current:
            self._rouse()

    def _rouse(self) -> None:
        with self._lock:
            if not self._closed and not self._woken:
                self._woken = True
                os.eventfd_write(self._wake, 1)

    def _remove(self, socket: zmq.Socket[bytes]) -> None:
        with self._sockets.in_use:
            monitor = self._sentry.forget(socket)
        if monitor:
            self._remove(monitor)
        if self._handlers.pop(socket, None):
            self._sockets.remove(socket)

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        with self._lock:
            self._check_open()
            return self._sockets.open(kind)

    def _add(self, socket: zmq.Socket[bytes], on_parts: OnParts) -> None:
        def add() -> None:
            self._handlers[socket] = on_parts
            self._sockets.add(socket)

        self.call_soon(add)

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._running:
            sockets, was_woken = self._sockets.wait(self._wait_s())
            if was_woken:
                os.eventfd_read(self._wake)
                self._woken = False
            for socket in sockets:
                self._receive(socket)
            self._run_calls()
            for call in self._timers.pop_due(self.clock()):
                self._guard(call)
        self._run_calls()

    def _die(self, death: Death) -> None:
        """Tell whoever lives by this loop, and send what they say last. On the dying thread, which has the sockets."""
        for told in self._mourners:
            self._last(partial(told, death))
        with self._lock:
            self._closed = True
            self._running = False
        self._linger_ms = GOODBYE_MS
        while self._calls:
            self._last(self._calls.popleft())

    def _last(self, call: Call) -> None:
        """One of several calls that must all have their turn, because none comes after them."""
        try:
            call()
        except BaseException:
            log.exception("a call of the dying control loop failed")

    def _check_open(self) -> None:
        if self.death:
            raise PartDead(self.death.text)
        if self._closed:
            raise StateError("the control loop is closed")

    def _run_calls(self) -> None:
        for _ in range(len(self._calls)):  # what these hand over in turn waits until the sockets have been looked at
            self._guard(self._calls.popleft())

    def _release(self) -> None:
        """Close what the loop holds, sockets included that were made but never came to the thread."""
        with self._lock:
            self._closed = True
            self._running = False
        self._sockets.close(self._linger_ms)
        os.close(self._wake)
        for held in (self._handlers, self._calls, self._timers):
            held.clear()

    def _wait_s(self) -> float:
        if self._calls or self._sockets.have_frames:
            return 0.0
        return self._timers.wait_s(self.clock(), LONGEST_WAIT_S)

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        on_parts = self._handlers.get(socket)
        if on_parts is None:  # to come, and looked at then; or gone
            return
        for _ in range(MAX_IN_A_ROW):
            try:
                parts = self._sockets.receive(socket)
            except zmq.ZMQError:  # a broken socket must not take the thread, and with it every other socket, along
                self.counters.handler_errors += 1
                log.exception("a control socket failed and was closed")
                self._remove(socket)
                return
            if parts is None:
                return
            self._guard(partial(on_parts, parts))
        self._sockets.look_again(socket)

    def _guard(self, call: Call) -> None:
        try:
            call()
        except FrameError as error:
            self.counters.malformed += 1
            self._log.warn("malformed", "malformed control frame dropped: %s", error)
            self.events.emit("control.malformed", text=str(error))
        except Exception:
            self.counters.handler_errors += 1
            log.exception("a control handler failed")
            self.events.emit("control.handler_error")

    def _parse(self, data: bytes) -> Frame:
        frame = decode(data, self._max_frame_bytes)
        self.counters.received += 1
        return frame


def _parts(parts: list[bytes], wanted: int) -> list[bytes]:
    if len(parts) != wanted:
        raise FrameError(f"a message of {len(parts)} parts where {wanted} are expected")
    return parts


class Server:
    """A bound ROUTER. `send` may be called from any thread."""

    def __init__(self, loop: ControlLoop, socket: zmq.Socket[bytes], address: Address) -> None:
        self._loop = loop
        self._socket = socket
        self.address = address

    def send(self, route: Route, frame: Frame) -> None:
        self._loop._send(self._socket, [[route, encode(frame)]])

    def close(self) -> None:
        self._loop.call_soon(lambda: self._loop._remove(self._socket))


class Channel:
    """A connected DEALER. `send` may be called from any thread."""

    def __init__(self, loop: ControlLoop, socket: zmq.Socket[bytes], address: Address) -> None:
        self._loop = loop
        self._socket = socket
        self.address = address

    def send(self, *frames: Frame) -> None:
        """Send frames in their order."""
        self._loop._send(self._socket, [[encode(frame)] for frame in frames])

    def close(self) -> None:
        self._loop.call_soon(lambda: self._loop._remove(self._socket))
