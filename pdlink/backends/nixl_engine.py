"""Owns the nixl library: how it is found and loaded, one agent of it, and its errors as ours. It knows no pages.

Facts that shape it, seen with nixl 1.5.1 (UCX 1.23):

- With the system's libibverbs present, UCX brings a second libnl-route-3 into the process, whose symbols then resolve
  to UCX's own bundled copy; its destructor unregisters what was never registered, and the process ends in a segfault.
  Loading the system's libibverbs on its own first makes each copy use its own symbols.
- An agent without a progress thread moves bytes only inside calls on it, and when it is destroyed nothing of its
  transfers lands any more, copies aside that a device has begun. `remove_remote_agent` and releasing a handle promise
  no such thing.
- Over tcp, UCX may abort an owner ("stubs.c:107 Assertion `0' failed") that finds, in one look, requests of a reader
  and the end of its connection: 5 of 12 times when a reader with 2,048 reads under way was killed, 0 of 10 with 64.
  So it may when a link is cut in the middle of reads ("ucp_request.inl:356 Fatal: unexpected error: Endpoint timeout").
- UCX says little about what it chose; UCX_LOG_LEVEL=info prints the transports and devices of every connection.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from pdlink.backends.cuda_driver import call, on_device
from pdlink.backends.interpreter_end import held_for_calls, refuse_at_end
from pdlink.errors import BackendError, BackendUnavailable, PeerGone, RegionError
from pdlink.layout.regions import MemoryKind

log = logging.getLogger("pdlink.backends")

PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")
Answer = TypeVar("Answer")
Indices: TypeAlias = npt.NDArray[np.int32]
_SEGMENT = {MemoryKind.HOST: "DRAM", MemoryKind.CUDA: "VRAM"}
_GONE = ("nixlRemoteDisconnectError",)
_RANGE = ("nixlNotFoundError", "nixlInvalidParamError")


@cache
def library() -> ModuleType:
    """The module with nixl's Python interface, whichever of its packages is installed.

    Raises `BackendUnavailable` with what to install.
    """
    with suppress(OSError):  # a machine without RDMA libraries has nothing that could be loaded twice
        ctypes.CDLL("libibverbs.so.1")
    # UCX reports to standard output unless told otherwise, and warns once per operation that a fence takes down.
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    # UCX would take SIGHUP for itself, and a process that lost its terminal would live on and log.
    os.environ.setdefault("UCX_DEBUG_SIGNO", "0")
    failures = []
    for name in PACKAGES:
        try:
            if find_spec(name) is not None and find_spec(f"{name}._api") is not None:
                found = import_module(f"{name}._api")
                _quiet_logging()
                return found
        except (ImportError, OSError) as error:
            failures.append(f"{name} cannot be loaded: {error}")
    raise BackendUnavailable(
        "; ".join(failures) or "nixl is not installed; pip install 'pdlink[nixl-cu12]' (or nixl-cu13 with CUDA 13)"
    )


def _quiet_logging() -> None:
    """Hand nixl's Python log records to the application's handlers; on import it prints them on standard output."""
    theirs = logging.getLogger("nixl")
    for handler in list(theirs.handlers):
        theirs.removeHandler(handler)
    theirs.propagate = True
    if "NIXL_LOG_LEVEL" not in os.environ:
        theirs.setLevel(logging.WARNING)


def translate(error: Exception, doing: str, peer: str = "") -> Exception:
    """An error of nixl as one of ours, with nixl's own name and text; any other one as it is."""
    name = type(error).__name__
    if not (name.startswith("nixl") and name.endswith("Error")):
        return error
    text = f"nixl failed to {doing}: {name} ({error})"
    if name in _GONE:
        return PeerGone(f"{peer or 'a peer'} is gone: {text}")
    return RegionError(text) if name in _RANGE else BackendError(text)


class Held:
    """A list or transfer of an agent. Once released, whoever keeps it, a traceback maybe, does not keep the agent."""

    __slots__ = ("raw",)

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def release(self) -> None:
        raw, self.raw = self.raw, None
        if raw is not None:
            raw.release()


class Agent:
    """One nixl agent with UCX, under a name that is never used again. Calls are serialised here; any thread may call.

    `destroy` ends it: from then on no transfer of it writes a byte. `device` is the CUDA device that its calls are made
    on, if any: UCX looks at its caller's when it chooses transports and copies.
    """

    def __init__(self, device: int | None = None) -> None:
        api = library()
        self.device = device
        self.name = f"pdlink-{os.getpid()}-{secrets.token_hex(8)}"
        self.lock = held_for_calls(threading.RLock())
        config = api.nixl_agent_config(
            # A progress thread burns a core per agent even when idle, and halves what cma and tcp move.
            enable_prog_thread=False,
            backends=["UCX"],
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        try:
            with self._on_device():
                self._nixl: Any = api.nixl_agent(self.name, config)
        except Exception as error:
            reason, allowed = translate(error, "start an agent over UCX"), os.environ.get("UCX_TLS", "")
            hint = " (on a machine with GPUs it must let cuda_copy in)" if allowed and "cuda" not in allowed else ""
            raise BackendUnavailable(f"{reason}; UCX_TLS={allowed or 'unset'}{hint}") from error
        if "UCX" not in self._nixl.backends:
            raise BackendUnavailable(
                f"nixl has no UCX plugin here; it has {', '.join(self._nixl.plugin_list) or 'none'}"
            )
        self._alive = weakref.ref(self._nixl.agent)

    @property
    def is_destroyed(self) -> bool:
        return self._nixl is None

    def _on_device(self) -> AbstractContextManager[None]:
        return nullcontext() if self.device is None else on_device(self.device)

    def call(self, doing: str, function: Callable[[Any], Answer], peer: str = "") -> Answer:
        """`function(nixl agent)`, with errors as ours. Raises `PeerGone` once destroyed."""
        with self.lock:
            if self._nixl is None:
                raise PeerGone(f"the nixl agent for {peer or 'this process'} was taken down")
            refuse_at_end()
            try:
                with self._on_device():
                    return function(self._nixl)
            except Exception as error:
                ours = translate(error, doing, peer)
                error.__traceback__ = None  # its frames hold the agent, which could then not be destroyed
                if ours is error:
                    raise
                raise ours from error

    def register(self, rows: Sequence[tuple[int, int, MemoryKind, int]]) -> None:
        """Register memory of one kind, all at once: (first address, past-the-end address, kind, device)."""
        self.call("register memory", lambda nixl: nixl.register_memory(_nixl_rows(rows), _SEGMENT[rows[0][2]]))

    def deregister(self, rows: Sequence[tuple[int, int, MemoryKind, int]]) -> None:
        """Undo `register` for these rows."""
        self.call(
            "deregister memory",
            lambda nixl: nixl.deregister_memory(nixl.get_reg_descs(_nixl_rows(rows), _SEGMENT[rows[0][2]])),
        )

    def metadata(self) -> bytes:
        return bytes(self.call("describe itself", lambda nixl: nixl.get_agent_metadata()))

    def add_peer(self, metadata: bytes, peer: str) -> str:
        """Load a peer's metadata; returns its agent name."""
        name = self.call("connect", lambda nixl: nixl.add_remote_agent(metadata), peer)
        return name.decode() if isinstance(name, bytes) else str(name)

    def prepare(self, name: str, rows: npt.NDArray[np.uint64], memory: MemoryKind, peer: str) -> Held:
        """A descriptor list: uint64 [n, 5] of (address, nbytes, device, stride, count), or [n, 3] without strides.

        `name` is a peer's agent name, or "" for own memory.
        """
        who = name or "NIXL_INIT_AGENT"
        return self.call(
            "prepare descriptors", lambda nixl: Held(nixl.prep_xfer_dlist(who, rows, _SEGMENT[memory])), peer
        )

    def make_read(self, own: Held, own_indices: Indices, theirs: Held, their_indices: Indices, peer: str) -> Held:
        """A transfer that reads entry by entry, neighbours merged. Indices are int32 of one length."""
        return self.call(
            "make a transfer",
            lambda nixl: Held(nixl.make_prepped_xfer("READ", own.raw, own_indices, theirs.raw, their_indices)),
            peer,
        )

    def post(self, transfer: Held, peer: str) -> str:
        """Start it; returns its state as `state` does. Where a kernel copies, the call copies all of it."""
        return str(self.call("read pages", lambda nixl: nixl.transfer(transfer.raw), peer))

    def state(self, transfer: Held, peer: str) -> str:
        """DONE, PROC or ERR. Raises `PeerGone` or `BackendError` when it failed."""
        return str(self.call("read pages", lambda nixl: nixl.check_xfer_state(transfer.raw), peer))

    def wait_for_device(self) -> None:
        """Wait for everything that this process has launched on the agent's device: copies between devices go on when
        an agent is destroyed. Raises `BackendError` when the device has failed."""
        if self.device is not None:
            with on_device(self.device):
                call("cuCtxSynchronize")

    def destroy(self) -> None:
        """Take the agent down, whatever it is doing. Handles and lists of it must have been let go. Twice is fine.

        Raises `BackendError` when something still holds it, since then nothing is proved.
        """
        with self.lock:
            with self._on_device():
                self._nixl = None
                if self._alive() is not None:
                    gc.collect()  # a traceback may hold a frame that holds it
            if self._alive() is not None:
                raise BackendError(f"nixl agent {self.name} is still in use, so it cannot be taken down")


def _nixl_rows(rows: Sequence[tuple[int, int, MemoryKind, int]]) -> list[tuple[int, int, int, str]]:
    return [(first, end - first, device, "") for first, end, _, device in rows]
