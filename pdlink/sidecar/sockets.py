"""Owns the unix sockets of a sidecar as files: where they may lie, who may connect, and that one sidecar has a place.

A place is refused where another user could put a socket of his own in the way: engines trust what answers there with
writing into their pools.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from pdlink.errors import InvalidInput

MODE = 0o600
MAX_PATH_BYTES = 107
"""Of a unix socket's address, on Linux."""
SUFFIX_BYTES = 24
"""What is added to the sidecar's own path for the sockets of its engines' processes."""
ENDS = ("rpc", "life", "fds")
"""Of the names of those: the stream, the lifeline, and where file descriptors are handed over."""
_UCRED = struct.Struct("3i")


def check_place(path: Path) -> None:
    """Raise `InvalidInput` unless sockets may lie at `path`: in a folder that this user, or root, alone can change."""
    folder = path.parent
    try:
        facts = folder.stat()
    except OSError as error:
        raise InvalidInput(
            f"the folder {folder} of the sidecar's socket cannot be used: {error.strerror}; make one of mode 700, or "
            "give another path"
        ) from error
    if not stat.S_ISDIR(facts.st_mode):
        raise InvalidInput(f"{folder}, where the sidecar's socket is to lie, is no folder")
    if facts.st_uid not in (os.geteuid(), 0) or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidInput(
            f"the folder {folder} of the sidecar's socket (mode {stat.S_IMODE(facts.st_mode):03o}, user "
            f"{facts.st_uid}) can be changed by other users than {os.geteuid()}; use one of mode 700"
        )


def check_path(path: Path) -> None:
    """Raise `InvalidInput` unless a sidecar may serve at `path`.

    It raises as `check_place` does, for a path that is too long, and for one where a file stands that is no socket:
    that is nobody's to remove.
    """
    check_place(path)
    if os.path.lexists(path) and not _is_socket(path):
        raise InvalidInput(f"there is a file at {path} that is no socket; give another path")
    nbytes, most = len(os.fsencode(path)), MAX_PATH_BYTES - SUFFIX_BYTES
    if nbytes > most:
        raise InvalidInput(f"the socket path {path} has {nbytes} bytes; the most is {most}: give a shorter one")


def check_socket(path: Path) -> None:
    """Raise `InvalidInput` unless a sidecar of this user may be behind `path`."""
    check_place(path)
    try:
        facts = path.lstat()
    except FileNotFoundError:
        return  # nobody is there now, which is for whoever connects to say
    if not stat.S_ISSOCK(facts.st_mode):
        raise InvalidInput(f"{path} is no socket; give the path that `pdlink sidecar` was started with")
    if facts.st_uid != os.geteuid():
        raise InvalidInput(
            f"the sidecar at {path} belongs to user {facts.st_uid}, this engine runs as user {os.geteuid()}; run both "
            "as one user"
        )


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Files made within are this user's alone from the start. Of the whole process: while it has one thread."""
    before = os.umask(0o777 & ~MODE)
    try:
        yield
    finally:
        os.umask(before)


class Place:
    """The right to serve at `path`, held until `close`. Removes what a sidecar that was killed has left there.

    Raises `InvalidInput` as `check_path` does, and where another sidecar serves already.
    """

    def __init__(self, path: Path) -> None:
        check_path(path)
        self.path = path
        self._lock_path = path.with_name(path.name + ".lock")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self._lock_path, flags, MODE)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise InvalidInput(f"a sidecar serves at {path} already; stop that one, or give another path") from None
        self._remove_sockets()

    def engine_paths(self) -> tuple[Path, ...]:
        """Names for the sockets of one engine's process, as `ENDS` has them."""
        made = secrets.token_hex(6)
        return tuple(self.path.with_name(f"{self.path.name}.{made}.{end}") for end in ENDS)

    def close(self) -> None:
        """Twice is fine."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        self._remove_sockets()
        remove(self._lock_path)
        os.close(fd)

    def _remove_sockets(self) -> None:
        remove(self.path)
        for end in ENDS:
            for one in self.path.parent.glob(f"{glob.escape(self.path.name)}.*.{end}"):
                # One that is served: an engine's process may take a moment to follow its sidecar.
                if _is_socket(one) and not _is_served(one):
                    remove(one)


def credentials(connection: socket.socket) -> tuple[int, int]:
    """The process (0 where it cannot be seen from here) and the user at the other end, as the kernel knows them."""
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _is_socket(path: Path) -> bool:
    """Of what stands there itself: a link to a socket is none."""
    with contextlib.suppress(FileNotFoundError):
        return stat.S_ISSOCK(path.lstat().st_mode)
    return False


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError as error:
            return error.errno == errno.EPROTOTYPE  # which a socket of another type says that somebody has bound
    return True
