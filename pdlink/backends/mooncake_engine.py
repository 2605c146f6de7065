"""Owns one transfer engine of the mooncake library: how it is loaded, started, given memory, read through, and ended so
that nothing is in flight. It knows neither peers nor plans, and checks no range.

What the library does (0.3.13.post1, `tcp`) decides how it is used here:

- A batch of several reads reports its first one only, or blocks for up to 30 s and spins meanwhile. So every read is a
  batch of its own: its state is exact, and asking for it never blocks.
- A read that has ended, well or badly, has given its buffer back. One to a peer that was stopped may stay open for
  ever, and lands when that peer goes on. Ending the engine closes its sockets and joins its threads; nothing lands
  after that.
- Reading writes into local memory whether that is registered or not.
- Its sockets listen on every interface, whatever host it is given, and whoever reaches them may read and write all
  registered memory. Use it on networks that only the deployment reaches.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Collection
from importlib import import_module, metadata
from typing import Any

from pdlink.address import Address
from pdlink.errors import BackendError, BackendUnavailable, RegionError

Span = tuple[int, int]
DONE, PENDING, FAILED = 1, 0, -1
"""States of a read. The library may also say -2, its own time limit, after which bytes still land: that is pending."""

LOG_HINT = "the library's own lines on standard error say more (MC_LOG_LEVEL=INFO for all of them)"
_OVERLAPS = -7
_HANDSHAKE = "P2PHANDSHAKE"
_FORCES = {"tcp": "MC_FORCE_TCP", "rdma": "MC_FORCE_HCA", "nvlink_intra": "MC_INTRANODE_NVLINK"}
"""Protocol -> the variable that makes the library use it, instead of what it likes best on this machine."""
_DEBIAN = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
    "librdmacm.so.1": "librdmacm1",
}
_ACCEPT_PAUSE_S = 0.02


def load(host: str, protocol: str) -> Any:
    """The library's `TransferEngine` class, set up for `protocol` and for the kind of address that `host` is.

    Raises `BackendUnavailable` with what to install or to set.
    """
    for other, variable in _FORCES.items():
        if other != protocol and variable in os.environ:
            raise BackendUnavailable(
                f"mooncake moves over {other} because {variable} is set, and mooncake_protocol is {protocol}; unset "
                f"{variable} or set PDLINK_MOONCAKE_PROTOCOL={other}"
            )
    if protocol == "nvlink_intra" and _is_cpu_build():
        raise BackendUnavailable(
            "the installed mooncake is built without CUDA and would use tcp for nvlink_intra; pip install "
            "'pdlink[mooncake]' in place of mooncake-transfer-engine-non-cuda, or set PDLINK_MOONCAKE_PROTOCOL=tcp"
        )
    # Before the library loads: it reads the environment from threads of its own, which must not race with a change.
    defaults = {"MC_LOG_LEVEL": "ERROR", _FORCES[protocol]: "1"}
    if protocol == "tcp":  # connections to a peer; on loopback, scattered 64 KiB reads gain a sixth over its 4
        defaults["MC_TCP_LANES_PER_PEER"] = "16"
    if ":" in host:
        defaults["MC_USE_IPV6"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    try:
        return import_module("mooncake.engine").TransferEngine
    except ModuleNotFoundError as error:
        raise BackendUnavailable(
            f"backend mooncake is not installed ({error}); pip install 'pdlink[mooncake-cpu]', or 'pdlink[mooncake]' "
            "for CUDA"
        ) from error
    except ImportError as error:
        library = str(error).partition(":")[0]
        if library in _DEBIAN:
            raise BackendUnavailable(
                f"backend mooncake needs {library}; install the Debian package {_DEBIAN[library]}"
            ) from error
        raise BackendUnavailable(f"the mooncake library cannot be loaded: {error}") from error


def _is_cpu_build() -> bool:
    names = {str(one.metadata["Name"]).lower() for one in metadata.distributions()}
    builds = {name for name in names if name.startswith("mooncake-transfer-engine")}
    return builds == {"mooncake-transfer-engine-non-cuda"}


class Engine:
    """One engine, for calls of one thread at a time. `close` twice is fine; nothing else may follow it.

    Raises `BackendUnavailable` when the library cannot be loaded, or does not start on this host and protocol.
    """

    def __init__(self, host: str, protocol: str) -> None:
        made = load(host, protocol)()
        if made.initialize(host, _HANDSHAKE, protocol, "") != 0:
            raise BackendUnavailable(f"mooncake does not start with protocol {protocol} on {host}; {LOG_HINT}")
        self.session = str(Address(host, made.get_rpc_port()))
        """How peers reach this engine: host and port."""
        self._engine: Any = made
        self._spans: frozenset[Span] = frozenset()
        self._spare = ctypes.create_string_buffer(8)
        self._spare_span = (ctypes.addressof(self._spare), ctypes.addressof(self._spare) + 8)

    def offer(self, spans: Collection[Span]) -> None:
        """Make exactly `spans` (start, stop; none overlaps another) known to the library. Raises `RegionError`."""
        wanted = {*spans, self._spare_span}
        gone, new = sorted(self._spans - wanted), sorted(wanted - self._spans)
        # What is taken back goes first: the library refuses memory that overlaps memory which it knows.
        if gone:
            self._engine.batch_unregister_memory([start for start, _ in gone])
            self._spans -= set(gone)
        if not new:
            return
        code = self._engine.batch_register_memory([start for start, _ in new], [stop - start for start, stop in new])
        if code != 0:
            raise RegionError(
                f"mooncake refuses memory {new[0][0]:#x}..{new[-1][1]:#x} in {len(new)} ranges (code {code}"
                f"{': it overlaps memory that it knows' if code == _OVERLAPS else ''}); {LOG_HINT}"
            )
        self._spans |= set(new)

    def read(self, session: str, destination: int, source: int, nbytes: int) -> int:
        """Post a read of `nbytes` bytes from `source` in the peer to `destination` here; returns its id.

        The first read from a session connects: 1 ms, or up to a minute from a peer that was stopped.
        """
        posted: int = self._engine.batch_transfer_async_read(session, [destination], [source], [nbytes])
        if posted == 0:
            raise BackendError(f"mooncake cannot read from {session}; {LOG_HINT}")
        return posted

    def read_byte(self, session: str, source: int) -> int:
        """As `read`, one byte into memory of this engine's own, after an `offer`: it shows that a peer answers."""
        return self.read(session, self._spare_span[0], source, 1)

    def check(self, posted: int) -> int:
        """DONE, FAILED or PENDING. After one of the first two the id is used up and its destination is quiet."""
        state: int = self._engine.transfer_check_status(posted)
        return state if state in (DONE, FAILED) else PENDING

    def close(self) -> None:
        """End the engine. No read that was open can land after this has returned."""
        if self._engine is None:
            return
        listener = _hurry(self._engine.get_rpc_port())
        try:
            engine, self._engine = self._engine, None
            if sys.getrefcount(engine) > 2:  # held here, by the question, and by a call of another thread: it lives on
                self._engine = engine
                raise BackendError("a mooncake engine cannot be ended while it is in use")
            del engine
        finally:
            if listener:
                listener.close()


def _hurry(port: int) -> socket.socket | None:
    """Make the library's listener on `port` look up at once, and every millisecond from then on.

    It waits in `accept` for up to a second, and the end of an engine waits for it with the GIL held, so that no thread
    of this process runs meanwhile. Returns a second handle of its socket; None where it is not found, and then that
    second is lost.
    """
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            found = socket.socket(fileno=os.dup(fd))
        except OSError:  # closed since it was listed
            continue
        try:
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and found.getsockname()[1] == port:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 1000))
                with socket.create_connection(("127.0.0.1", port), timeout=1):
                    pass
                time.sleep(_ACCEPT_PAUSE_S)
                return found
        except OSError:
            pass
        found.close()
    return None
