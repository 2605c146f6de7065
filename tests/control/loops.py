"""Owns what the loop tests share: loops that are closed after the test, boxes that frames arrive in, strangers."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator

import zmq

from pdlink.address import Address
from pdlink.control.frames import Frame, Ping
from pdlink.control.loop import Channel, ControlLoop, Server

TIMEOUT_S = 60.0
ANY = Address("127.0.0.1", 0)


class Box:
    """A handler of either kind that keeps what arrives. `take` waits for the next."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple] = queue.Queue()

    def __call__(self, *arrived: object) -> None:
        self._queue.put(arrived)

    def take(self) -> tuple:
        return self._queue.get(timeout=TIMEOUT_S)

    def wait(self, timeout_s: float) -> None:
        """Until something has arrived, or for that long."""
        give_up = time.monotonic() + timeout_s
        while self.is_empty and time.monotonic() < give_up:
            time.sleep(0.01)

    @property
    def is_empty(self) -> bool:
        return self._queue.empty()


def ping(nonce: int) -> Frame:
    return Frame("", 0, Ping(nonce))


def flush(loop: ControlLoop) -> None:
    """Wait until the loop has run everything that was handed to it before."""
    done = threading.Event()
    loop.call_soon(done.set)
    assert done.wait(TIMEOUT_S)


def passes(server: Server, box: Box, channel: Channel, nonce: int) -> bool:
    """Whether a frame still goes from `channel` to the server and an answer back to whoever sent it."""
    channel.send(ping(nonce))
    route, frame = box.take()
    server.send(route, ping(nonce + 1))
    return frame == ping(nonce)


def reaches(server: Server, box: Box, channel: Channel, nonce: int) -> bool:
    """As `passes`, of a channel that may not know yet that its last server is gone: what it sends then is lost."""
    give_up = time.monotonic() + TIMEOUT_S
    while box.is_empty and time.monotonic() < give_up:
        channel.send(ping(nonce))
        box.wait(0.5)
    route, frame = box.take()
    server.send(route, ping(nonce + 1))
    return frame == ping(nonce)


@contextlib.contextmanager
def stranger(address: Address, kind: int = zmq.DEALER) -> Iterator[zmq.Socket]:
    """A connected raw socket of a context of its own."""
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://{address}")
        yield socket
