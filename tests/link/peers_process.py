"""Owns the process that plays many peers with raw zmq sockets: prefill ranks that hold nothing, or decode ranks.

peers_process owners NUM                               says their ports, then answers whatever comes
peers_process readers NUM PORT FINGERPRINT INCARNATION each subscribes a request of its own, and waits
peers_process flood NUM PORT FINGERPRINT INCARNATION   each sends whatever it can, as fast as it can
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from typing import Any

import zmq

from pdlink.bootstrap.messages import PROTOCOL
from pdlink.control.frames import Abort, AbortAck, Body, Frame, Release, Subscribe, Subscribed, Verdict
from pdlink.control.wire import decode, encode
from pdlink.layout.readers import ReaderSet
from pdlink.limits import raise_soft_limit
from pdlink.testing.parent import Parent
from pdlink.transfer.failure import Failure, FailureReason

INCARNATION = 7
CAUSE = Failure(FailureReason.ABORTED, "flood")


def answer(body: Body) -> Body | None:
    if isinstance(body, Subscribe):
        return Subscribed(INCARNATION, 0, True)
    if isinstance(body, Release):
        return Verdict(True)
    return AbortAck() if isinstance(body, Abort) else None


def owners(context: zmq.Context[zmq.Socket[bytes]], parent: Parent, num_peers: int) -> None:
    """One socket that listens at as many ports: to whoever connects each is a peer of its own."""
    socket = context.socket(zmq.ROUTER)
    ports = []
    for _ in range(num_peers):
        socket.bind("tcp://127.0.0.1:0")
        ports.append(int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]))
    parent.say(ports)
    while True:
        route, data = socket.recv_multipart()
        frame = decode(data)
        if body := answer(frame.body):
            socket.send_multipart([route, encode(Frame(frame.transfer_id, frame.attempt, body))])


def readers(
    context: zmq.Context[zmq.Socket[bytes]], parent: Parent, num_peers: int, port: int, digest: bytes, incarnation: int
) -> None:
    sockets = []
    for number in range(num_peers):
        socket = context.socket(zmq.DEALER)
        socket.connect(f"tcp://127.0.0.1:{port}")
        body = Subscribe(PROTOCOL, digest, ReaderSet(f"dec{number}"), incarnation, (), 0)
        socket.send(encode(Frame(f"t{number}", number + 1, body)))
        sockets.append(socket)
    for socket in sockets:
        assert isinstance(decode(socket.recv()).body, Subscribed)
    parent.say(num_peers)
    threading.Event().wait()


def flood(
    context: zmq.Context[zmq.Socket[bytes]], parent: Parent, num_peers: int, port: int, digest: bytes, incarnation: int
) -> None:
    sockets = []
    for _ in range(num_peers):
        socket = context.socket(zmq.DEALER)
        socket.connect(f"tcp://127.0.0.1:{port}")
        sockets.append(socket)
    parent.say(num_peers)
    for number in itertools.count(1):
        readers = ReaderSet("flood")
        early = [Subscribe(PROTOCOL, digest, readers, incarnation, (), 0), Release(readers, {}), Abort(CAUSE, readers)]
        said = [encode(Frame(f"f{number}", number, body)) for body in early]
        for socket in sockets:
            for data in (*said, b"\xff" * 64, bytes(512 << 10)):
                socket.send(data)  # waits for room


def main(role: str, num_peers: str, *rest: str) -> None:
    raise_soft_limit()
    parent = Parent()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 1 << 16)
    # By a thread of its own, because the parent's end is heard on standard input.
    told = (int(rest[0]), bytes.fromhex(rest[1]), int(rest[2])) if rest else ()
    body: Any = {"readers": readers, "owners": owners, "flood": flood}[role]
    threading.Thread(target=body, args=(context, parent, int(num_peers), *told), daemon=True).start()
    sys.stdin.read()
    os._exit(0)  # thousands of sockets need no goodbye


if __name__ == "__main__":
    main(*sys.argv[1:])
