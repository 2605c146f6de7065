"""Owns the lifeline between an engine and the process that serves it: a unix socket on which each end sees the other's
death. Nothing is said on it.

The kernel tells who is at the other end (SO_PEERCRED), so that neither can name somebody else, and a pidfd tells its
end also where a child that it has forked keeps the socket open.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

from pdlink.errors import AccessDenied, DeadlineExceeded, PeerGone
from pdlink.sidecar.sockets import check_socket, credentials, private_files, remove


@dataclass(slots=True, eq=False)
class OtherEnd:
    """The process at the other end. `pid` is 0 where it lives in a pid namespace that cannot be seen from here, and
    `pidfd` -1 then. `close` twice is fine; the other end takes it for our death."""

    pid: int
    pidfd: int
    _socket: socket.socket

    def watched(self) -> tuple[int, ...]:
        """File descriptors that become readable when it has gone."""
        return (self._socket.fileno(), *((self.pidfd,) if self.pidfd >= 0 else ()))

    def hang_up(self) -> None:
        """Have the other end take us for dead, and go on seeing its own end."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            return  # it has gone already

    def wait_ended(self, timeout_s: float) -> bool:
        """Whether the process has ended within `timeout_s`: none of its code runs any more."""
        return _is_readable(self.pidfd if self.pidfd >= 0 else self._socket.fileno(), timeout_s)

    def kill(self) -> None:
        """End the process at once, stopped or not. Does nothing where it cannot be seen from here."""
        if self.pidfd >= 0:
            try:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            except ProcessLookupError:
                return

    def close(self) -> None:
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)
        self._socket.close()


class Listener:
    """The end of the serving process. It takes one connection; `close` twice is fine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with private_files():
                self._socket.bind(str(path))
            self._socket.listen(1)
        except BaseException:
            self._socket.close()
            raise

    def accept(self, timeout_s: float, *others: int) -> OtherEnd | None:
        """The engine, or None when one of the file descriptors `others` becomes readable first. Raises
        `DeadlineExceeded`, and `AccessDenied` for a process of another user."""
        ready = wait_any((self._socket.fileno(), *others), timeout_s)
        if any(one in ready for one in others):
            return None
        if not ready:
            raise DeadlineExceeded(f"no engine came within {timeout_s:g} s")
        connection, _ = self._socket.accept()
        return _known(connection)

    def close(self) -> None:
        self._socket.close()
        remove(self._path)


def connect(path: Path, timeout_s: float) -> OtherEnd:
    """The engine's end. Raises `PeerGone` where nothing listens, and `AccessDenied` for a process of another user."""
    check_socket(path)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(timeout_s)
        made.connect(str(path))
        made.settimeout(None)
    except OSError as error:
        made.close()
        raise PeerGone(f"the sidecar's process for this engine does not listen at {path}: {error.strerror}") from error
    return _known(made)


def _known(connection: socket.socket) -> OtherEnd:
    """With who it is. Closes the connection where that is refused."""
    pid, uid = credentials(connection)
    if uid != os.geteuid():
        connection.close()
        raise AccessDenied(f"process {pid} of user {uid} is at the other end of a lifeline of user {os.geteuid()}")
    pidfd = -1
    if pid > 0:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # it has died already, or this kernel has none
            pidfd = -1
        if pidfd >= 0 and _is_readable(connection.fileno(), 0):  # dead: the number may be somebody else's by now
            os.close(pidfd)
            pidfd = -1
    return OtherEnd(pid, pidfd, connection)


def _is_readable(fd: int, timeout_s: float) -> bool:
    return bool(wait_any((fd,), timeout_s))


def wait_any(fds: tuple[int, ...], timeout_s: float | None = None) -> set[int]:
    """Those that are readable or have ended, once there is one or the time is over (None: as long as it takes)."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return {fd for fd, _ in poller.poll(None if timeout_s is None else max(0.0, timeout_s) * 1e3)}
