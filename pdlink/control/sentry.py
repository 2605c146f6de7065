"""Owns the guard of a loop's CURVE sockets: it answers libzmq's questions about keys and counts whom that turned away.

It opens its own two kinds of socket through the loop, whose thread alone touches them. Frames are not its business.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket as net
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import zmq
from zmq.utils.monitor import parse_monitor_message

from pdlink.address import Address
from pdlink.control import zap
from pdlink.control.curve import ServerKeys, secure_server
from pdlink.control.handshakes import WATCHED, Handshakes
from pdlink.control.sockets import Socket
from pdlink.denials import Denials
from pdlink.errors import FrameError
from pdlink.events import Events

WRONG_KEY = "wrong key"

OnParts = Callable[[list[bytes]], None]


@dataclass(slots=True)
class _Post:
    """One guarded socket."""

    domain: bytes
    client_public: bytes
    monitor: Socket
    place: Address | None = None
    """Where the socket is bound."""
    handshakes: Handshakes = field(default_factory=Handshakes)

    @property
    def name(self) -> str:
        return f"control socket {self.place}" if self.place else "a control socket"


class Sentry:
    """All CURVE servers of one loop. `guard` before a socket is bound, `bound` after, `forget` before it is closed."""

    def __init__(self, open_socket: Callable[[int], Socket], add: Callable[[Socket, OnParts], None], events: Events):
        self._open_socket = open_socket
        self._add = add
        self._denials = Denials("control.denied", events)
        self._posts: dict[Socket, _Post] = {}
        self._numbers = itertools.count(1)
        self._zap: Socket | None = None
        self._lock = threading.Lock()

    @property
    def counts(self) -> Mapping[str, int]:
        """Strangers turned away, by reason."""
        return self._denials.counts

    def guard(self, socket: Socket, keys: ServerKeys) -> None:
        """Let only holders of the client's keys talk to `socket`, and count who fails."""
        with self._lock:
            if self._zap is None:
                self._zap = self._open_socket(zmq.ROUTER)
                self._zap.bind(zap.ENDPOINT)
                self._add(self._zap, self._on_question)
        domain = b"pdlink-%d" % next(self._numbers)
        secure_server(socket, keys, domain)
        place = f"inproc://{domain.decode()}"
        socket.monitor(place, WATCHED)
        monitor = self._open_socket(zmq.PAIR)
        monitor.connect(place)
        post = _Post(domain, keys.client_public, monitor)
        with self._lock:
            self._posts = {**self._posts, socket: post}
        self._add(monitor, partial(self._on_event, post))

    def bound(self, socket: Socket, place: Address) -> None:
        """Say where the socket is bound, for the log."""
        if socket in self._posts:
            self._posts[socket].place = place

    def forget(self, socket: Socket) -> Socket | None:
        """Take nobody in for `socket` any more; its monitor, for the loop to close."""
        post = self._posts.get(socket)
        if post is None:
            return None
        with self._lock:
            self._posts = {one: kept for one, kept in self._posts.items() if one is not socket}
        with contextlib.suppress(zmq.ZMQError):  # of a socket that has failed
            socket.disable_monitor()
        return post.monitor

    def _on_question(self, parts: list[bytes]) -> None:
        posts = {post.domain: post for post in self._posts.values()}
        answer = zap.answer(parts, {domain: post.client_public for domain, post in posts.items()})
        if answer is None:
            raise FrameError(f"a question of {len(parts)} parts about keys")
        if answer.denied:
            post = posts.get(answer.domain)
            self._denials.add(post.name if post else "a control socket", _plain(answer.denied), WRONG_KEY)
        assert self._zap is not None
        with contextlib.suppress(zmq.Again):  # whoever asked has gone
            self._zap.send_multipart(answer.parts, zmq.NOBLOCK)

    def _on_event(self, post: _Post, parts: list[bytes]) -> None:
        event = parse_monitor_message(parts)
        kind, value = int(event["event"]), int(event["value"])
        peer = _peer_of(value, post.place) if kind == zmq.Event.ACCEPTED else ""
        refused = post.handshakes.see(kind, value, peer)
        if refused:
            self._denials.add(post.name, refused.peer, refused.reason)


def _peer_of(descriptor: int, place: Address | None) -> str:
    """The host at the other end of a connection that was accepted at `place`, where it still is one."""
    try:
        with net.socket(fileno=os.dup(descriptor)) as copy:
            return _plain(str(copy.getpeername()[0])) if place and copy.getsockname()[1] == place.port else ""
    except (OSError, IndexError):  # it has gone
        return ""


def _plain(host: str) -> str:
    """An IPv4 address that an IPv6 socket sees, as people write it."""
    return host.removeprefix("::ffff:")
