"""Owns the handing over of file descriptors from an engine to the process that serves it: a unix socket on which each
message is a ticket with some of them (SCM_RIGHTS). What they are is not looked at.

The kernel tells who sends; a process of another user is turned away.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from pdlink.errors import AccessDenied, DeadlineExceeded, FrameError, PeerGone
from pdlink.sidecar.sockets import check_socket, credentials, private_files, remove

TICKET_BYTES = 16
MAX_AT_ONCE = 128
"""Descriptors of one message; the kernel takes 253."""
MAX_DESCRIPTORS = 4096
SEND_TIMEOUT_S = 20.0
_INT_BYTES = 4


def hand_over(path: Path, descriptors: Sequence[int]) -> bytes:
    """Send copies of `descriptors`, which stay the caller's; returns the ticket under which they are taken.

    Raises `PeerGone` where nobody listens at `path`, and `FrameError` for too many.
    """
    if len(descriptors) > MAX_DESCRIPTORS:
        raise FrameError(f"{len(descriptors)} blocks of device memory; at most {MAX_DESCRIPTORS}: allocate larger ones")
    ticket = secrets.token_bytes(TICKET_BYTES)
    check_socket(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:
        made.settimeout(SEND_TIMEOUT_S)
        try:
            made.connect(str(path))
            for first in range(0, len(descriptors), MAX_AT_ONCE):
                socket.send_fds(made, [ticket], list(descriptors[first : first + MAX_AT_ONCE]))
        except OSError as error:
            raise PeerGone(f"the sidecar's process for this engine takes no memory at {path}: {error}") from error
    return ticket


class Desk:
    """The serving process's end, where descriptors are taken by ticket. `close` twice is fine."""

    def __init__(self, path: Path) -> None:
        """While this process has one thread: the socket's file gets its mode from the umask."""
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._held: dict[bytes, list[int]] = {}
        """What came for others than who was waiting."""
        try:
            with private_files():
                self._socket.bind(str(path))
            self._socket.listen(16)
        except BaseException:
            self._socket.close()
            raise

    def take(self, ticket: bytes, count: int, timeout_s: float) -> list[int]:
        """`count` descriptors that came with `ticket`, which the caller closes. They were sent before it is called.

        Raises `DeadlineExceeded` when they do not come, `FrameError` for more or less of them.
        """
        if not count:
            return []
        if len(ticket) != TICKET_BYTES or count > MAX_DESCRIPTORS:
            raise FrameError(f"{count} blocks are handed over by a ticket of {len(ticket)} bytes, not {TICKET_BYTES}")
        give_up = time.monotonic() + timeout_s
        with self._lock:
            while ticket not in self._held:
                self._accept(give_up)
            found = self._held.pop(ticket)
        if len(found) != count:
            _close(found)
            raise FrameError(f"{len(found)} file descriptors were handed over, and {count} blocks have none else")
        return found

    def close(self) -> None:
        self._socket.close()
        remove(self._path)
        with self._lock:
            held, self._held = self._held, {}
        for one in held.values():
            _close(one)

    def _accept(self, give_up: float) -> None:
        """One sender, whole."""
        try:
            self._socket.settimeout(max(0.0, give_up - time.monotonic()) or 1e-3)
            connection, _ = self._socket.accept()
        except TimeoutError as error:
            raise DeadlineExceeded("the engine has not handed over the memory that it named") from error
        except OSError as error:
            raise PeerGone(f"nothing is handed over any more: {error}") from error
        with connection:
            pid, uid = credentials(connection)
            if uid != os.geteuid():
                raise AccessDenied(f"process {pid} of user {uid} hands memory to a sidecar of user {os.geteuid()}")
            found: list[int] = []
            try:
                ticket = self._receive(connection, found, give_up)
            except BaseException:
                _close(found)
                raise
            if ticket:
                self._held.setdefault(ticket, []).extend(found)

    def _receive(self, connection: socket.socket, found: list[int], give_up: float) -> bytes:
        """Its ticket; the descriptors go into `found`."""
        ticket = b""
        while True:
            connection.settimeout(max(0.0, give_up - time.monotonic()) or 1e-3)
            try:
                data, is_whole = _receive_one(connection, found)
            except TimeoutError as error:
                raise DeadlineExceeded("the engine has not finished handing over its memory") from error
            except OSError as error:
                raise PeerGone(f"the engine went away while it handed over its memory: {error}") from error
            if not data:
                return ticket
            if not is_whole or len(data) != TICKET_BYTES or ticket not in (b"", data):
                raise FrameError("what was handed over is cut off, or comes under two tickets")
            if len(found) > MAX_DESCRIPTORS:
                raise FrameError(f"more than {MAX_DESCRIPTORS} file descriptors are handed over at once")
            ticket = data


def _receive_one(connection: socket.socket, found: list[int]) -> tuple[bytes, bool]:
    """One message, whose descriptors go into `found`, and whether all of them came. `socket.recv_fds` would let
    children of this process inherit them."""
    data, parts, flags, _ = connection.recvmsg(
        TICKET_BYTES + 1, socket.CMSG_SPACE(MAX_AT_ONCE * _INT_BYTES), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, sent in parts:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.extend(memoryview(sent[: len(sent) - len(sent) % _INT_BYTES]).cast("i"))
    return data, not flags & socket.MSG_CTRUNC


def _close(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        os.close(fd)
