"""Owns the I/O thread of a process: its zmq sockets, its timers, and calls handed to it. It knows no request.

Sockets are touched by this thread alone. Frames arrive parsed; what cannot be parsed is counted and dropped. A handler
that raises is logged and counted, and the thread lives on.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import zmq

from pdlink.address import Address
from pdlink.control.frames import Frame
from pdlink.control.timers import Call, Timer, Timers
from pdlink.control.wire import decode, encode
from pdlink.errors import FrameError, InvalidInput, StateError
from pdlink.events import Events

log = logging.getLogger("pdlink.control")

Clock: TypeAlias = Callable[[], float]
Route: TypeAlias = bytes
"""The identity of a DEALER as its ROUTER sees it; a reconnect changes it."""
ServerHandler: TypeAlias = Callable[[Route, Frame], None]
ClientHandler: TypeAlias = Callable[[Frame], None]

MAX_SOCKETS = 16_384
"""A decode process has one for every prefill rank that it pulls from."""
LONGEST_WAIT_S = 1.0


@dataclass(slots=True)
class LoopCounters:
    """What the loop has seen. Written by the I/O thread only; read by anyone."""

    received: int = 0
    sent: int = 0
    malformed: int = 0
    dropped: int = 0
    handler_errors: int = 0


class ControlLoop:
    """One I/O thread. `start` before use; `close` twice is fine and waits for the thread."""

    def __init__(self, max_frame_bytes: int = 4 << 20, events: Events | None = None, clock: Clock = time.monotonic):
        self.clock = clock
        self.events = events or Events()
        self.counters = LoopCounters()
        self._max_frame_bytes = max_frame_bytes
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._poller = zmq.Poller()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake, zmq.POLLIN)
        self._calls: deque[Call] = deque()
        self._timers = Timers()
        self._handlers: dict[zmq.Socket[bytes], Callable[[list[bytes]], None]] = {}
        self._woken = False
        """A wake-up is on its way; cleared after it was read and before the calls are run."""
        self._running = False
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="pdlink-control", daemon=True)

    def start(self) -> ControlLoop:
        if self._closed:
            raise StateError("the control loop is closed")
        self._running = True
        self._thread.start()
        return self

    @property
    def is_alive(self) -> bool:
        return self._running and self._thread.is_alive()

    def call_soon(self, call: Call) -> None:
        """Run `call` on the I/O thread. Any thread may ask; dropped silently once the loop is closed."""
        with self._lock:
            if self._closed:
                return
            self._calls.append(call)
            # The I/O thread looks at its calls before it sleeps. Every write lets another thread take the GIL.
            if not self._woken and threading.current_thread() is not self._thread:
                self._woken = True
                os.eventfd_write(self._wake, 1)

    def call_later(self, delay_s: float, call: Call) -> Timer:
        """Run `call` on the I/O thread after `delay_s`. Any thread may ask; `cancel()` the result to forget it."""
        timer = self._timers.make(self.clock() + delay_s, call)
        self.call_soon(lambda: self._timers.set(timer))
        return timer

    def bind(self, address: Address, handler: ServerHandler) -> Server:
        """Listen with a ROUTER at `address` (port 0: any). Raises `InvalidInput` when the port is taken."""
        socket = self._socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        host = f"[{address.host}]" if address.is_ipv6 else address.host
        try:
            socket.bind(f"tcp://{host}:{address.port}")
            port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        except zmq.ZMQError as error:
            socket.close(0)
            raise InvalidInput(f"cannot listen on {address} for control frames: {error}; choose another") from error

        def on_parts(parts: list[bytes]) -> None:
            route, data = _parts(parts, 2)
            handler(route, self._parse(data))

        self._add(socket, on_parts)
        return Server(self, socket, Address(address.host, port))

    def connect(self, address: Address, handler: ClientHandler) -> Channel:
        """Talk to a ROUTER at `address` with a DEALER. Connects and reconnects in the background; never blocks."""
        socket = self._socket(zmq.DEALER)
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
        if self._thread.ident is None:
            self._release()
        elif threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    # --- used by Server and Channel ---------------------------------------------------------------

    def _send(self, socket: zmq.Socket[bytes], parts: list[bytes]) -> None:
        try:
            socket.send_multipart(parts, zmq.NOBLOCK)
            self.counters.sent += 1
        except zmq.ZMQError as error:
            # A full queue or a vanished route loses the frame; every frame that matters is repeated.
            self.counters.dropped += 1
            log.debug("control frame dropped: %s", error)

    def _remove(self, socket: zmq.Socket[bytes]) -> None:
        if self._handlers.pop(socket, None):
            self._poller.unregister(socket)
            socket.close(100)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        with self._lock:
            if self._closed:
                raise StateError("the control loop is closed")
            socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_frame_bytes)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        return socket

    def _add(self, socket: zmq.Socket[bytes], on_parts: Callable[[list[bytes]], None]) -> None:
        def add() -> None:
            self._handlers[socket] = on_parts
            self._poller.register(socket, zmq.POLLIN)

        self.call_soon(add)

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._running:
                for socket, _ in self._poller.poll(self._wait_ms()):
                    if socket == self._wake:
                        os.eventfd_read(self._wake)
                        self._woken = False
                    else:
                        self._receive(socket)
                self._run_calls()
                for call in self._timers.pop_due(self.clock()):
                    self._guard(call)
            self._run_calls()
        finally:
            self._release()

    def _run_calls(self) -> None:
        for _ in range(len(self._calls)):  # what these hand over in turn waits until the sockets have been looked at
            self._guard(self._calls.popleft())

    def _release(self) -> None:
        """Close what the loop holds, sockets included that were made but never came to the thread."""
        with self._lock:
            self._closed = True
            self._running = False
        self._context.destroy(linger=0)
        os.close(self._wake)
        for held in (self._handlers, self._calls, self._timers):
            held.clear()

    def _wait_ms(self) -> int:
        return 0 if self._calls else math.ceil(self._timers.wait_s(self.clock(), LONGEST_WAIT_S) * 1000)

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        handler = self._handlers.get(socket)
        for _ in range(64):  # a flood on one socket must not starve the timers
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError:  # a broken socket must not take the thread, and with it every other socket, along
                self.counters.handler_errors += 1
                log.exception("a control socket failed and was closed")
                self._remove(socket)
                return
            if handler:
                self._guard(partial(handler, parts))
            if socket.closed or not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return  # cheaper than to be told by a second receive, which would give the GIL away once more

    def _guard(self, call: Call) -> None:
        try:
            call()
        except FrameError as error:
            self.counters.malformed += 1
            log.warning("malformed control frame dropped: %s", error)
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
        data = encode(frame)
        self._loop.call_soon(lambda: self._loop._send(self._socket, [route, data]))

    def close(self) -> None:
        self._loop.call_soon(lambda: self._loop._remove(self._socket))


class Channel:
    """A connected DEALER. `send` may be called from any thread."""

    def __init__(self, loop: ControlLoop, socket: zmq.Socket[bytes], address: Address) -> None:
        self._loop = loop
        self._socket = socket
        self.address = address

    def send(self, frame: Frame) -> None:
        data = encode(frame)
        self._loop.call_soon(lambda: self._loop._send(self._socket, [data]))

    def close(self) -> None:
        self._loop.call_soon(lambda: self._loop._remove(self._socket))
