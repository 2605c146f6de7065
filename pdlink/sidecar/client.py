"""Owns the front door of an engine whose link is in a sidecar: `connect`.

The engine's pools stay its own; the sidecar has them mapped, and ends with its part of it when the engine ends.
"""

from __future__ import annotations

import itertools
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
from pdlink.errors import StateError
from pdlink.health import HealthReport
from pdlink.layout.components import CacheLayout
from pdlink.layout.decode_plan import DecodePlace
from pdlink.layout.regions import Region
from pdlink.prefill.rank import PrefillRank
from pdlink.sidecar.engine_decode import DecodePool, SidecarDecode
from pdlink.sidecar.engine_prefill import SidecarPrefill
from pdlink.sidecar.seat import LEAVE_TIMEOUT_S, Seat
from pdlink.threads import SupervisedThread

if TYPE_CHECKING:
    from pdlink.runtime.node import Node
    from pdlink.runtime.verbs import NodeVerbs

CONNECT_TIMEOUT_S = 60.0
"""The sidecar starts a process for the engine, with all its transports."""

WorkerT = TypeVar("WorkerT", SidecarPrefill, SidecarDecode)


def connect(path: str | Path, *, timeout_s: float = CONNECT_TIMEOUT_S) -> SidecarNode:
    """The sidecar that listens at `path`, as a `NodeVerbs`: an engine opens this where it would open a `Node`.

    Pools are allocated with `pdlink.memory.allocate`, or on a GPU by cudaMalloc with a block for each tensor. Raises
    `SidecarGone` where none answers, `InvalidInput` for a path that another user could have put a socket at,
    `AccessDenied` where one has.
    """
    return SidecarNode(Path(path).absolute(), timeout_s)


class SidecarNode:
    """One engine process at its sidecar, which serves it by a process for each GPU that its pools are on. `close` ends
    its workers first; twice is fine.

    When the sidecar ends, requests fail with the reason, and the workers are attached again as soon as one answers.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        """Call `connect` instead."""
        self.path = path
        self._timeout_s = timeout_s
        self._seats = [Seat(path, timeout_s)]
        self._workers: list[SidecarPrefill | SidecarDecode] = []
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._closed = False
        self._ended: queue.SimpleQueue[Receiver | None] = queue.SimpleQueue()
        self._callbacks = SupervisedThread(self._call_back, "pdlink-sidecar-callbacks", "sidecar client")
        self._callbacks.start()

    @property
    def backends(self) -> tuple[str, ...]:
        """The names of the sidecar's transports."""
        return self._seats[0].backends

    @property
    def pid(self) -> int:
        """Of the sidecar's (first) process for this engine; 0 while there is none, or where it cannot be seen."""
        return self._seats[0].pid

    @property
    def pids(self) -> tuple[int, ...]:
        """Of its processes for this engine, one for each GPU."""
        return tuple(one.pid for one in self._seats)

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
            is_there = all(one.is_there for one in self._seats)
        parts["sidecar"] = "" if is_there else f"no sidecar answers at {self.path}"
        reasons = tuple(text for text in parts.values() if text)
        return HealthReport(not reasons, reasons, parts)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            seats, workers = list(self._seats), list(self._workers)
        for worker in reversed(workers):
            worker.close()
        for seat in seats:
            seat.close()
        self._ended.put(None)
        self._callbacks.join(LEAVE_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- inside -------------------------------------------------------------------------------------

    def _add(self, worker: WorkerT) -> WorkerT:
        with self._lock:
            if self._closed:
                raise StateError(f"the client of the sidecar at {self.path} is closed")
            seat = self._seat(worker.gpu)
            seat.add(worker)
            seat.gpu = worker.gpu
            self._workers.append(worker)
        return worker

    def _seat(self, gpu: bytes) -> Seat:
        """The process for that GPU: the first one where no worker has come to it yet, or another one."""
        found = next((one for one in self._seats if one.gpu in (gpu, None)), None)
        if found is None:
            found = Seat(self.path, self._timeout_s)
            self._seats.append(found)
        return found

    def _call_back(self) -> None:
        """Callbacks are the engine's and may call in, which the stream's own thread must not."""
        while (receiver := self._ended.get()) is not None:
            receiver.call_back()


if TYPE_CHECKING:

    def _is_node(node: SidecarNode | Node) -> NodeVerbs:
        return node
