"""Owns POSIX shared-memory segments: their creation, attachment, naming and removal. It knows no pages or layers.

A segment is a file `/dev/shm/pdlink-<pid>-<random>` whose owner holds a shared `flock` on it for as long as it lives.
The kernel drops that lock when the owner dies, however it dies, so whoever gets the exclusive lock may remove what
was left behind; process ids are not asked, because containers that share /dev/shm do not share them.

`multiprocessing.shared_memory` is not used: its resource tracker unlinks segments under live peers.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import sys
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from pdlink.errors import BackendUnavailable, InvalidInput, PeerGone, RegionError, StateError

SHM_DIR = "/dev/shm"
PREFIX = "pdlink-"
_NAME = re.compile(r"pdlink-[0-9]{1,10}-[0-9a-f]{16}")
_CREATE_ATTEMPTS = 8
SWEEP_AGAIN_S = 0.02
_PROTECTION = {False: mmap.PROT_READ, True: mmap.PROT_READ | mmap.PROT_WRITE}


@dataclass(frozen=True, slots=True)
class Location:
    """Where an address lies: byte `offset` of the segment `name`, which has `nbytes` bytes in all."""

    name: str
    offset: int
    nbytes: int


class Segment:
    """A writable segment of this process, zero-filled, every byte of it backed by memory from the start.

    Memory rules: the mapping lives until `close`, and beyond it for as long as a view made from `array` is alive.
    Peers that attached keep their own mapping after `close`; new ones are refused. Only the process that created the
    segment removes its file: in a forked child, `close` just unmaps. Thread-safe.
    """

    def __init__(self, name: str, nbytes: int, fd: int) -> None:
        """Take over the open and locked `fd`; call `Segment.create` instead."""
        self.name = name
        self.nbytes = nbytes
        self._pid = os.getpid()
        self._fd = fd
        self._map: mmap.mmap | None = mmap.mmap(fd, nbytes)
        self.address = _address_of(self._map)

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """A new segment of `nbytes` bytes (at least 1).

        Raises `BackendUnavailable` when /dev/shm has not that much room, with the bytes wanted, the bytes free and
        what to change. The first call of a process removes segments whose owner is dead.
        """
        if nbytes < 1:
            raise InvalidInput(f"a shared-memory segment needs at least 1 byte, got nbytes={nbytes}")
        _TABLE.prepare()
        name, fd = _open_locked()
        try:
            _fill(fd, nbytes)
            segment = cls(name, nbytes, fd)
        except BaseException:
            _unlink(name)
            os.close(fd)
            raise
        _TABLE.add(segment)
        return segment

    @property
    def array(self) -> np.ndarray:
        """uint8 [nbytes], writable, over the segment itself. Raises `StateError` once closed."""
        if self._map is None:
            raise StateError(f"shared-memory segment {self.name} is closed")
        return np.frombuffer(self._map, dtype=np.uint8)

    @property
    def view(self) -> memoryview:
        """A writable view over the segment itself. Raises `StateError` once closed."""
        return self.array.data

    @property
    def is_closed(self) -> bool:
        return self._map is None

    def close(self) -> None:
        """Remove the file and unmap. Views that are still alive keep the memory mapped until they go."""
        mapped, self._map = self._map, None
        if mapped is None:
            return
        _TABLE.remove(self)
        if os.getpid() == self._pid:
            _unlink(self.name)
        os.close(self._fd)
        with contextlib.suppress(BufferError):
            mapped.close()

    def __repr__(self) -> str:
        return f"Segment({self.name}, nbytes={self.nbytes}{', closed' if self.is_closed else ''})"


class AttachedSegment:
    """A mapping of another process's segment: read-only, unless it was adopted. It stays after the owner closed it or
    died."""

    def __init__(self, name: str, nbytes: int, mapped: mmap.mmap) -> None:
        self.name = name
        self.nbytes = nbytes
        self._map: mmap.mmap | None = mapped
        self.address = _address_of(mapped)

    @property
    def array(self) -> np.ndarray:
        """uint8 [nbytes], read-only unless adopted. Raises `StateError` once closed."""
        if self._map is None:
            raise StateError(f"shared-memory segment {self.name} is detached")
        return np.frombuffer(self._map, dtype=np.uint8)

    def close(self) -> None:
        """Unmap; views that are still alive keep the memory mapped until they go."""
        mapped, self._map = self._map, None
        if mapped is not None:
            _TABLE.remove(self)
            with contextlib.suppress(BufferError):
                mapped.close()


def attach(name: str, nbytes: int) -> AttachedSegment:
    """Map the segment `name`, which its owner says has `nbytes` bytes, for reading.

    Raises `RegionError` for a name that is not a segment's, a file that cannot be opened, or another size; `PeerGone`
    when the file is not there any more, or its owner has died.
    """
    return _attach(name, nbytes, is_writable=False)


def adopt(name: str, nbytes: int) -> AttachedSegment:
    """Map the segment `name` of another process of this user for writing too, and let `locate` find it: peers of this
    process may then be told of it as if it were its own. Its owner alone ever removes it.

    Raises as `attach` does, and `RegionError` for a segment of another user.
    """
    segment = _attach(name, nbytes, is_writable=True)
    _TABLE.add(segment)
    return segment


def _attach(name: str, nbytes: int, *, is_writable: bool) -> AttachedSegment:
    if not _NAME.fullmatch(name):
        raise RegionError(f"{name!r} is not the name of a pdlink shared-memory segment ({PREFIX}<pid>-<random>)")
    try:
        flags = os.O_RDWR if is_writable else os.O_RDONLY
        fd = os.open(f"{SHM_DIR}/{name}", flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        raise PeerGone(f"shared-memory segment {name} is gone: its owner closed it, or runs on another host") from exc
    except OSError as exc:
        raise RegionError(
            f"shared-memory segment {name} cannot be opened: {exc.strerror}; run both processes as one user"
        ) from exc
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise RegionError(f"shared-memory segment {name} is not a regular file")
        if facts.st_size != nbytes:
            raise RegionError(f"shared-memory segment {name} has {facts.st_size} bytes, its owner said {nbytes}")
        if _lock_alone(fd):
            raise PeerGone(f"shared-memory segment {name} was left by an owner that has died")
        if is_writable and facts.st_uid != os.geteuid():
            raise RegionError(
                f"shared-memory segment {name} belongs to user {facts.st_uid} and this process runs as user "
                f"{os.geteuid()}; run both as one user"
            )
        return AttachedSegment(name, nbytes, mmap.mmap(fd, nbytes, prot=_PROTECTION[is_writable]))
    finally:
        os.close(fd)


def locate(address: int, nbytes: int) -> Location | None:
    """The own or adopted, open segment that holds all of [address, address + nbytes), or None. Thread-safe."""
    return _TABLE.locate(address, nbytes)


def adopted() -> tuple[str, ...]:
    """The names of the segments that are adopted here and not closed. Thread-safe."""
    return _TABLE.adopted()


def close_all() -> None:
    """Close every segment of this process, for one that is about to end without running its exit handlers."""
    _TABLE.close_all()


def sweep_stale() -> tuple[str, ...]:
    """Remove segments whose owner is dead and return their names. Those of other users are left alone."""
    removed = []
    for name in sorted(os.listdir(SHM_DIR)):
        if _NAME.fullmatch(name) and _remove_if_ownerless(name):
            removed.append(name)
    return tuple(removed)


def sweep_until_gone(names: Collection[str], timeout_s: float) -> None:
    """As `sweep_stale`, again and again until none of `names` is left or the time is over: the kernel holds the lock of
    an owner that has died for as long as somebody, a monitor say, looks into that process's memory."""
    give_up = time.monotonic() + timeout_s
    while True:
        sweep_stale()
        if not any(os.path.exists(f"{SHM_DIR}/{name}") for name in names) or time.monotonic() >= give_up:
            return
        time.sleep(SWEEP_AGAIN_S)


def _remove_if_ownerless(name: str) -> bool:
    try:
        fd = os.open(f"{SHM_DIR}/{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not _lock_alone(fd):
            return False
        # An owner that is between making its file and locking it finds it locked by us, or unlinked, and makes
        # another one (see _open_locked).
        _unlink(name)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _lock_alone(fd: int) -> bool:
    """Take the exclusive lock, which an owner that lives, wherever it lives, does not let go; until `fd` is closed."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _open_locked() -> tuple[str, int]:
    """A new empty file that we hold the shared lock of."""
    for _ in range(_CREATE_ATTEMPTS):
        name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(f"{SHM_DIR}/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return name, fd
        except BlockingIOError:
            _unlink(name)
        os.close(fd)
    raise BackendUnavailable(f"{_CREATE_ATTEMPTS} new shared-memory segments were removed by others before use")


def _fill(fd: int, nbytes: int) -> None:
    """Back every byte now: a sparse file in a full /dev/shm would be a SIGBUS at some later write."""
    free = _free_bytes()
    try:
        if nbytes > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM):
            raise
        raise BackendUnavailable(
            f"{SHM_DIR} has {free} bytes free and {nbytes} are wanted; enlarge it (docker run --shm-size, or mount -o "
            f"remount,size=... {SHM_DIR}) or use fewer pages"
        ) from exc


def _free_bytes() -> int:
    facts = os.statvfs(SHM_DIR)
    # A tmpfs without a limit says 0 of 0 blocks.
    return facts.f_bavail * facts.f_frsize if facts.f_blocks else sys.maxsize


def _unlink(name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{SHM_DIR}/{name}")


def _address_of(mapped: mmap.mmap) -> int:
    return int(np.frombuffer(mapped, dtype=np.uint8).__array_interface__["data"][0])


class _Table:
    """The open segments of this process by address. Removes at exit what nobody closed."""

    def __init__(self) -> None:
        # Held again by the thread that has it, when a signal's handler ends the process in the middle of a change.
        self._lock = threading.RLock()
        self._starts: list[int] = []
        self._segments: list[Segment | AttachedSegment] = []
        self._prepared = False

    def prepare(self) -> None:
        """Once per process: clear what dead owners left, and arrange for our own end."""
        with self._lock:
            if self._prepared:
                return
            self._prepared = True
        atexit.register(self.close_all)
        os.register_at_fork(after_in_child=self._forget_parent)
        sweep_stale()

    def add(self, segment: Segment | AttachedSegment) -> None:
        with self._lock:
            at = bisect.bisect(self._starts, segment.address)
            self._starts.insert(at, segment.address)
            self._segments.insert(at, segment)

    def remove(self, segment: Segment | AttachedSegment) -> None:
        with self._lock:
            if segment in self._segments:
                at = self._segments.index(segment)
                del self._starts[at], self._segments[at]

    def locate(self, address: int, nbytes: int) -> Location | None:
        with self._lock:
            at = bisect.bisect(self._starts, address) - 1
            if at < 0 or nbytes < 0:
                return None
            segment = self._segments[at]
        offset = address - segment.address
        return Location(segment.name, offset, segment.nbytes) if offset + nbytes <= segment.nbytes else None

    def adopted(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(one.name for one in self._segments if isinstance(one, AttachedSegment))

    def close_all(self) -> None:
        for segment in list(self._segments):
            segment.close()

    def _forget_parent(self) -> None:
        """In a forked child: the segments are the parent's, and its lock may have been held at the fork."""
        self._lock = threading.RLock()
        self._starts, self._segments = [], []


_TABLE = _Table()
