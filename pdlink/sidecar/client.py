"""Owns the front door of an engine whose link is in a sidecar: `connect`, and the way back when the sidecar was away.

The engine's pools stay its own; the sidecar has them mapped, and ends with its part of it when the engine ends.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from pdlink.address import Address
from pdlink.bootstrap.messages import PROTOCOL, ProtocolRange
from pdlink.decode.receiver import Receiver
from pdlink.errors import PdlinkError, StateError
from pdlink.health import HealthReport
from pdlink.layout.components import CacheLayout
from pdlink.layout.decode_plan import DecodePlace
from pdlink.layout.regions import Region
from pdlink.prefill.worker import PrefillRank
from pdlink.sidecar.engine_decode import DecodePool, SidecarDecode
from pdlink.sidecar.engine_prefill import SidecarPrefill
from pdlink.sidecar.stream import EngineStream, SidecarGone
from pdlink.threads import SupervisedThread

if TYPE_CHECKING:
    from pdlink.runtime.node import Node
    from pdlink.runtime.verbs import NodeVerbs

log = logging.getLogger("pdlink.sidecar")

CONNECT_TIMEOUT_S = 60.0
"""The sidecar starts a process for the engine, with all its transports."""
LEAVE_TIMEOUT_S = 30.0
LEAST_RETRY_S, MOST_RETRY_S = 0.05, 1.0

WorkerT = TypeVar("WorkerT", SidecarPrefill, SidecarDecode)


def connect(path: str | Path, *, timeout_s: float = CONNECT_TIMEOUT_S) -> SidecarNode:
    """The sidecar that listens at `path`, as a `NodeVerbs`: an engine opens this where it would open a `Node`.

    Pools are allocated with `pdlink.memory.allocate`. Raises `SidecarGone` where none answers, `InvalidInput` for a
    path that another user could have put a socket at, `AccessDenied` where one has.
    """
    return SidecarNode(Path(path).absolute(), timeout_s)


class SidecarNode:
    """One engine process at its sidecar. `close` ends its workers first; twice is fine.

    When the sidecar ends, requests fail with the reason, and the workers are attached again as soon as one answers.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        """Call `connect` instead."""
        self.path = path
        self._timeout_s = timeout_s
        self._stream: EngineStream | None = EngineStream(path, timeout_s)
        self._backends = self._stream.backends
        self._workers: list[SidecarPrefill | SidecarDecode] = []
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        """Held while workers are attached: to a stream, all of them or none."""
        self._closed = threading.Event()
        self._ended: queue.SimpleQueue[Receiver | None] = queue.SimpleQueue()
        self._callbacks = SupervisedThread(self._call_back, "pdlink-sidecar-callbacks", "sidecar client")
        self._callbacks.start()
        self._keeper = SupervisedThread(self._keep, "pdlink-sidecar-keeper", "sidecar client")
        self._keeper.start()

    @property
    def backends(self) -> tuple[str, ...]:
        """The names of the sidecar's transports."""
        return self._backends

    @property
    def pid(self) -> int:
        """Of the sidecar's process for this engine; 0 while there is none, or where it cannot be seen."""
        stream = self._stream
        return stream.pid if stream and not stream.is_over else 0

    def prefill(self, rank: PrefillRank, bootstraps: Sequence[Address] = ()) -> SidecarPrefill:
        """As `Node.prefill`. Raises `RegionError` for pools that the sidecar cannot map, with what to change."""
        return self._add(SidecarPrefill(next(self._numbers), rank, bootstraps, os.getpid()))

    def decode(
        self,
        instance: str,
        layout: CacheLayout,
        regions: Sequence[Region],
        protocol: ProtocolRange = PROTOCOL,
        place: DecodePlace | None = None,
    ) -> SidecarDecode:
        """As `Node.decode`. Raises `RegionError` for pools that the sidecar cannot map, with what to change."""
        pool = DecodePool(instance, layout, tuple(regions), protocol, place)
        return self._add(SidecarDecode(next(self._numbers), pool, os.getpid(), self._ended.put))

    def health(self) -> HealthReport:
        """Whether the sidecar is there, and every worker attached."""
        with self._lock:
            parts = {one.name: one.standing for one in self._workers if not one.is_closed}
        stream = self._stream
        parts["sidecar"] = "" if stream and not stream.is_over else f"no sidecar answers at {self.path}"
        reasons = tuple(text for text in parts.values() if text)
        return HealthReport(not reasons, reasons, parts)

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        with self._lock:
            stream, workers = self._stream, list(self._workers)
        for worker in reversed(workers):
            worker.close()
        if stream:
            stream.leave(LEAVE_TIMEOUT_S)
        self._keeper.join(self._timeout_s + LEAVE_TIMEOUT_S)
        self._ended.put(None)
        self._callbacks.join(LEAVE_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- inside -------------------------------------------------------------------------------------

    def _add(self, worker: WorkerT) -> WorkerT:
        with self._lock:
            if self._closed.is_set():
                raise StateError(f"the client of the sidecar at {self.path} is closed")
            if self._stream is None:
                raise SidecarGone(f"no sidecar answers at {self.path} now; the client goes back by itself")
            worker.attach(self._stream)
            self._workers.append(worker)
        return worker

    def _keep(self) -> None:
        """Be attached: go back to the sidecar whenever it was away."""
        while True:
            stream = self._stream
            assert stream is not None
            stream.wait_ended()
            if self._closed.is_set():
                return
            log.warning("the sidecar at %s is away (%s); requests fail until it is back", self.path, stream.reason)
            with self._lock:
                self._stream = None
            if not self._go_back():
                return

    def _go_back(self) -> bool:
        """Whether it was found, before `close`."""
        delay_s = LEAST_RETRY_S
        said = ""
        while not self._closed.wait(delay_s):
            delay_s = min(MOST_RETRY_S, 2 * delay_s)
            try:
                stream = EngineStream(self.path, self._timeout_s)
            except PdlinkError as error:
                if str(error) != said:
                    log.warning("%s", error)
                said = str(error)
                continue
            with self._lock:
                is_closed = self._closed.is_set()
                if not is_closed:
                    self._attach_all(stream)
                    self._stream = stream
            if is_closed:
                stream.leave(LEAVE_TIMEOUT_S)
            return not is_closed
        return False

    def _attach_all(self, stream: EngineStream) -> None:
        for worker in self._workers:
            try:
                worker.attach(stream)
            except SidecarGone:
                return  # this stream has ended too, which is seen next
            except PdlinkError as error:
                log.error("%s cannot be attached to the sidecar again: %s", worker.name, error)
        log.warning("back at the sidecar at %s", self.path)

    def _call_back(self) -> None:
        """Callbacks are the engine's and may call in, which the stream's own thread must not."""
        while (receiver := self._ended.get()) is not None:
            receiver.call_back()


if TYPE_CHECKING:

    def _is_node(node: SidecarNode | Node) -> NodeVerbs:
        return node
