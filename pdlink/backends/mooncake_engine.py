"""Owns one transfer engine of the mooncake library: how it is loaded, started, given memory, read through, and ended so
that nothing is in flight. It knows neither peers nor plans, and checks no range.

What the library does decides how it is used here. Over `tcp` (0.3.13.post1):

- A batch of several reads reports its first one only, or blocks for up to 30 s and spins meanwhile. So every read is a
  batch of its own: its state is exact, and asking for it never blocks.
- A read that has ended, well or badly, has given its buffer back. One to a peer that was stopped may stay open for
  ever, and lands when that peer goes on. Ending the engine closes its sockets and joins its threads; nothing lands
  after that.
- Reading writes into local memory whether that is registered or not.
- Its sockets listen on every interface, whatever host it is given, and whoever reaches them may read and write all
  registered memory. Use it on networks that only the deployment reaches.

Over `nvlink_intra` (0.3.14, CUDA 13):

- A batch's reads are copies on a stream that belongs to the calling thread. Asking for the state of an asynchronous
  batch gives the batch back once its first read is done, and asking again then ends the process. So batches are read
  with the blocking call, which tells of all of them, by threads of ours that take turns.
- It opens the owner's allocations by CUDA IPC, on the calling thread's current device. The owner exports whole
  allocations, whatever part of them is registered, and each once; a part that is taken back takes all of it back.
- Local memory need not be known, and host memory cannot be.
- Copies go on when the engine ends, and whether the peer is stopped or not.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module, metadata
from typing import Any

from pdlink.address import Address
from pdlink.backends.cuda_driver import EXPANDABLE, DeviceBlock, call, find_allocation, on_device
from pdlink.backends.interpreter_end import held_for_calls, refuse_at_end
from pdlink.backends.lanes import Lanes
from pdlink.errors import BackendError, BackendUnavailable, RegionError

Span = tuple[int, int]
NVLINK = "nvlink_intra"
DONE, PENDING, FAILED = 1, 0, -1
"""States of a read. The library may also say -2, its own time limit, after which bytes still land: that is pending."""

LOG_HINT = "the library's own lines on standard error say more (MC_LOG_LEVEL=INFO for all of them)"
_OVERLAPS = -7
_HANDSHAKE = "P2PHANDSHAKE"
_FORCES = {"tcp": "MC_FORCE_TCP", "rdma": "MC_FORCE_HCA", NVLINK: "MC_INTRANODE_NVLINK"}
"""Protocol -> the variable that makes the library use it, instead of what it likes best on this machine."""
_DEBIAN = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
    "librdmacm.so.1": "librdmacm1",
}
_ACCEPT_PAUSE_S = 0.02
_SPARE_BYTES = 8
_NUM_LANES = 2
_LANE_TIMEOUT_S = 2.0


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
    if protocol == NVLINK and is_cpu_build():
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


def is_cpu_build() -> bool:
    """Whether the installed library knows no device memory."""
    names = {str(one.metadata["Name"]).lower() for one in metadata.distributions()}
    builds = {name for name in names if name.startswith("mooncake-transfer-engine")}
    return builds == {"mooncake-transfer-engine-non-cuda"}


class Engine:
    """One engine, for calls of one thread at a time. `close` twice is fine; nothing else may follow it.

    `device` is the CUDA device that its calls are made on, if any; over nvlink there has to be one. Raises
    `BackendUnavailable` when the library cannot be loaded, or does not start on this host and protocol.
    """

    def __init__(self, host: str, protocol: str, device: int | None = None) -> None:
        self._device = device
        self._is_nvlink = protocol == NVLINK
        made = load(host, protocol)()
        with self._on_device():
            if made.initialize(host, _HANDSHAKE, protocol, "") != 0:
                raise BackendUnavailable(f"mooncake does not start with protocol {protocol} on {host}; {LOG_HINT}")
        self.session = str(Address(host, made.get_rpc_port()))
        """How peers reach this engine: host and port."""
        self._engine: Any = made
        self._calls = held_for_calls(threading.RLock())
        self._spans: frozenset[Span] = frozenset()
        self._spare: DeviceBlock | _Spare = _Spare()
        if self._is_nvlink:
            assert device is not None
            self._spare = DeviceBlock(_SPARE_BYTES, device)
        self._lanes = Lanes(_NUM_LANES if self._is_nvlink else 0, "pdlink-mooncake")
        """What reads over nvlink."""
        self._numbers = itertools.count(1)
        self._reading: dict[int, Future[int]] = {}
        """Batches over nvlink, until their state was DONE or FAILED."""

    def offer(self, spans: Collection[Span]) -> None:
        """Make exactly `spans` (start, stop; none overlaps another) known to the library. Raises `RegionError`."""
        spare = (self._spare.address, self._spare.address + _SPARE_BYTES)
        wanted = self._allocations(spans) if self._is_nvlink else {*spans, spare}
        gone, new = sorted(self._spans - wanted), sorted(wanted - self._spans)
        with self._calls, self._on_device():
            refuse_at_end()
            # What is taken back goes first: the library refuses memory that overlaps memory which it knows.
            if gone:
                self._engine.batch_unregister_memory([start for start, _ in gone])
                self._spans -= set(gone)
            if not new:
                return
            sizes = [stop - start for start, stop in new]
            code = self._engine.batch_register_memory([start for start, _ in new], sizes)
        if code != 0:
            raise RegionError(
                f"mooncake refuses memory {new[0][0]:#x}..{new[-1][1]:#x} in {len(new)} ranges (code {code}"
                f"{': it overlaps memory that it knows' if code == _OVERLAPS else ''}); "
                f"{EXPANDABLE + '; ' if self._is_nvlink else ''}{LOG_HINT}"
            )
        self._spans |= set(new)

    def offer_destinations(self, spans: Collection[Span]) -> None:
        """As `offer`, for memory that reads only write to."""
        if not self._is_nvlink:
            self.offer(spans)

    def read(self, session: str, destinations: list[int], sources: list[int], sizes: list[int]) -> int:
        """Post reads from `sources` in the peer to `destinations` here, as one batch; returns its id.

        Over anything but nvlink, of one read. The first batch from a session connects: 1 ms, or up to a minute from a
        peer that was stopped.
        """
        if self._is_nvlink:
            number = next(self._numbers)
            self._reading[number] = self._lanes.begin(self._read_whole, session, destinations, sources, sizes)
            return number
        assert len(sizes) == 1
        with self._calls:
            refuse_at_end()
            posted: int = self._engine.batch_transfer_async_read(session, destinations, sources, sizes)
        if posted == 0:
            raise BackendError(f"mooncake cannot read from {session}; {LOG_HINT}")
        return posted

    def _read_whole(
        self, begun: threading.Event, session: str, destinations: list[int], sources: list[int], sizes: list[int]
    ) -> int:
        with self._on_device():
            begun.set()
            code: int = self._engine.batch_transfer_sync_read(session, destinations, sources, sizes)
            if code != 0:
                call("cuCtxSynchronize")  # some of the batch may have been started, on a stream of the library's
        return code

    def read_byte(self, session: str, source: int) -> int:
        """As `read`, one byte into memory of this engine's own, after an `offer`: it shows that a peer answers."""
        posted = self.read(session, [self._spare.address], [source], [1])
        if self._is_nvlink:
            wait([self._reading[posted]])
        return posted

    def check(self, posted: int) -> int:
        """DONE, FAILED or PENDING. After one of the first two the id is used up and its destinations are quiet."""
        if self._is_nvlink:
            if not self._reading[posted].done():
                return PENDING
            try:
                return DONE if self._reading.pop(posted).result() == 0 else FAILED
            except BackendError:  # the device has failed, and nothing runs on it any more
                return FAILED
        with self._calls:
            refuse_at_end()
            state: int = self._engine.transfer_check_status(posted)
        return state if state in (DONE, FAILED) else PENDING

    def close(self) -> None:
        """End the engine. No read that was open can land after this has returned.

        Raises `BackendError` while a read over nvlink does not come back: it waits for an answer of its peer.
        """
        if self._engine is None:
            return
        if wait(self._reading.values(), _LANE_TIMEOUT_S).not_done:
            raise BackendError(f"a read over mooncake has not come back for {_LANE_TIMEOUT_S:g} s")
        self._lanes.close()
        listener = _hurry(self._engine.get_rpc_port())
        try:
            engine, self._engine = self._engine, None
            if sys.getrefcount(engine) > 2:  # held here, by the question, and by a call of another thread: it lives on
                self._engine = engine
                raise BackendError("a mooncake engine cannot be ended while it is in use")
            with self._on_device():
                del engine
        finally:
            if listener:
                listener.close()
        self._spare.close()

    def _allocations(self, spans: Collection[Span]) -> set[Span]:
        """The allocations that hold the spans. Raises `RegionError` for a span that goes beyond one."""
        assert self._device is not None
        found = set()
        for start, stop in spans:
            held = find_allocation(start, self._device)
            if stop > held.stop:
                raise RegionError(
                    f"memory {start:#x}..{stop:#x} goes beyond its allocation {held.start:#x}..{held.stop:#x} of "
                    f"device {held.device}; {EXPANDABLE}"
                )
            found.add((held.start, held.stop))
        return found

    def _on_device(self) -> AbstractContextManager[None]:
        return nullcontext() if self._device is None else on_device(self._device)


class _Spare:
    """Host memory for a first byte that is read from a peer."""

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(_SPARE_BYTES)
        self.address = ctypes.addressof(self._buffer)

    def close(self) -> None:
        pass


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
