"""Owns the zmq sockets of a control loop: every use of one, and the news which of them have frames. It parses nothing,
and has no thread: one thread waits and reads, and any may send.

zmq's sockets may be used by one thread at a time, so that one lock is taken for each use. Whoever waits does so for
their descriptors instead of them. Such a descriptor tells of news, not of frames: any use of a socket may take that
news in, and whoever has used it must look whether frames have come with it (zmq_getsockopt(3), ZMQ_FD).
"""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

import zmq

from pdlink.errors import LimitReached

log = logging.getLogger("pdlink.control")

Socket: TypeAlias = "zmq.Socket[bytes]"

MAX_SOCKETS = 16_384
"""A decode process has one for every prefill rank that it pulls from."""
POLLIN, NOBLOCK = int(zmq.POLLIN), int(zmq.NOBLOCK)
"""As numbers: with flags of an enum, each of the library's operations on them makes a new one."""
HANDSHAKE_TIMEOUT_MS = 5000
KEEPALIVE = (
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 60),
    (zmq.TCP_KEEPALIVE_INTVL, 10),
    (zmq.TCP_KEEPALIVE_CNT, 3),
)
"""A connection that is silent for 60 s is asked every 10 s, and ends without three answers."""
LAST_FRAMES_MS = 100
"""How long frames of a socket that is removed may take to leave."""


@dataclass(slots=True)
class LoopCounters:
    """What a loop has seen. `sent` and `dropped` (lost here) are written by whoever sends, one at a time, and the
    others by the loop's thread; read by anyone."""

    received: int = 0
    sent: int = 0
    malformed: int = 0
    dropped: int = 0
    handler_errors: int = 0


@dataclass(slots=True)
class _News:
    """Which sockets may have frames: those whose descriptor says so, and those of which none does any more."""

    epoll: select.epoll = field(default_factory=select.epoll)
    descriptors: dict[Socket, int] = field(default_factory=dict)
    sockets: dict[int, Socket] = field(default_factory=dict)
    filled: set[Socket] = field(default_factory=set)


class Sockets:
    """Those of one loop. `wait`, `add`, `receive` and `remove` are one thread's; `open` and `send` are anybody's."""

    def __init__(self, max_frame_bytes: int, max_queued_frames: int, counters: LoopCounters, wake: int) -> None:
        """`wake` is a descriptor that ends a `wait` too."""
        self._counters = counters
        self._max_frame_bytes = max_frame_bytes
        self._max_queued_frames = max_queued_frames
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._news = _News()
        self._news.epoll.register(wake, select.EPOLLIN)
        self.in_use = threading.RLock()
        """Held for every use of a socket that was opened here, once others know it. It may be taken again by a signal's
        handler."""
        self._sender = 0
        """The thread that sends now."""
        self._gone = False

    def open(self, kind: int) -> Socket:
        """A socket that nobody else knows yet. Raises `LimitReached`."""
        try:
            socket = self._context.socket(kind)
        except zmq.ZMQError as error:
            raise LimitReached(
                f"a control socket beside {len(self._news.sockets)} others cannot be opened: {error}; raise the limit "
                "of open files (ulimit -n), or lower PDLINK_MAX_PEERS"
            ) from error
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_frame_bytes)
        socket.setsockopt(zmq.SNDHWM, self._max_queued_frames)
        socket.setsockopt(zmq.RCVHWM, self._max_queued_frames)
        # The descriptor of a peer whose host has gone without a word, or that never says what it wants, comes back.
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
        for option, value in KEEPALIVE:
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        return socket

    def add(self, socket: Socket) -> None:
        """Wait for its frames from now on, those included that have come already."""
        news = self._news
        with self.in_use:
            descriptor = int(socket.getsockopt(zmq.FD))
            news.descriptors[socket] = descriptor
            news.sockets[descriptor] = socket
            news.epoll.register(descriptor, select.EPOLLIN)
            news.filled.add(socket)

    def remove(self, socket: Socket) -> None:
        """Close it. What it has still to send may take a moment to leave."""
        news = self._news
        with self.in_use:
            descriptor = news.descriptors.pop(socket)
            news.epoll.unregister(descriptor)
            del news.sockets[descriptor]
            news.filled.discard(socket)
            socket.close(LAST_FRAMES_MS)

    @property
    def have_frames(self) -> bool:
        """Whether some may have frames of which `wait` would say so at once."""
        return bool(self._news.filled)

    def wait(self, timeout_s: float) -> tuple[list[Socket], bool]:
        """Those that may have frames, and whether something else than a socket has ended the wait."""
        news = self._news
        told = [descriptor for descriptor, _ in news.epoll.poll(timeout_s)]
        with self.in_use:
            found, news.filled = news.filled, set()
            of_sockets = [news.sockets[one] for one in told if one in news.sockets]
            found.update(of_sockets)
        return list(found), len(of_sockets) < len(told)

    def receive(self, socket: Socket) -> list[bytes] | None:
        """The next message, None where there is none. Raises `zmq.ZMQError` for a socket that has failed."""
        with self.in_use:
            if not self._has_frames(socket):
                return None
            with suppress(zmq.Again):
                return socket.recv_multipart(NOBLOCK)
            return None

    def look_again(self, socket: Socket) -> None:
        """Have the next `wait` name it."""
        with self.in_use:
            self._news.filled.add(socket)

    def send(self, socket: Socket, messages: Sequence[list[bytes]]) -> bool:
        """Send messages in their order, never blocking; what cannot be sent is counted as dropped. Returns whether
        frames have come meanwhile of which only a new `wait` will know. Not while `is_sending`."""
        with self.in_use:
            if self._gone:
                self._counters.dropped += len(messages)
                return False
            try:
                self._sender = threading.get_ident()
                for parts in messages:
                    self._send(socket, parts)
            finally:
                has_frames = self._has_frames(socket)
                if has_frames:
                    self._news.filled.add(socket)
                self._sender = 0
        return has_frames

    @property
    def is_sending(self) -> bool:
        """Whether this thread is in the middle of a `send`, and this a signal's handler."""
        return self._sender == threading.get_ident()

    def close(self, linger_ms: int) -> None:
        """Close all of them; their last frames have so long to leave, while nobody who sends has to wait."""
        with self.in_use:
            self._gone = True
        self._context.destroy(linger=linger_ms)
        self._news.epoll.close()

    def _send(self, socket: Socket, parts: list[bytes]) -> None:
        try:
            socket.send_multipart(parts, NOBLOCK)
            self._counters.sent += 1
        except zmq.ZMQError as error:
            # A full queue or a vanished route loses the frame; every frame that matters is repeated.
            self._counters.dropped += 1
            log.debug("control frame dropped: %s", error)
        except BaseException:  # a signal's, on an engine's thread: what was begun must not swallow the next message
            if len(parts) > 1:
                with suppress(zmq.ZMQError):
                    socket.send(b"", NOBLOCK)
            raise

    def _has_frames(self, socket: Socket) -> bool:
        """To be asked after each use of a socket. What is wrong with one shows when it is read."""
        try:
            return not socket.closed and bool(int(socket.getsockopt(zmq.EVENTS)) & POLLIN)
        except zmq.ZMQError:
            return True
