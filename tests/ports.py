"""Owns ports that a test wants to be nobody's for now, and a server's of its own later."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def held_port(host: str = "127.0.0.1") -> Iterator[int]:
    """A TCP port where nothing listens, until a server that reuses addresses does, as those of zmq and gRPC do.

    A socket stays bound to it, so that the kernel gives it to nobody who asks for any port, in whatever process.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield holder.getsockname()[1]
