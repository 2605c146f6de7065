"""Owns what a prefill and a decode rank of an engine have in common whose link is in a sidecar: whether it is attached,
over which stream, and how it is detached.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence

from pdlink.errors import PdlinkError, PeerGone, StateError
from pdlink.layout.regions import Region
from pdlink.sidecar import wire
from pdlink.sidecar.device_blocks import gpu_of, show
from pdlink.sidecar.handover import hand_over
from pdlink.sidecar.stream import EngineStream, SidecarGone
from pdlink.v1 import sidecar_pb2 as pb

ATTACH_TIMEOUT_S = 60.0
"""Mapping a pool, and making staging memory known to every transport."""
DETACH_TIMEOUT_S = 60.0
"""Longer than the sidecar takes to make pulls quiet."""

_numbers = itertools.count(1)
"""Of requests. In all of the process, so that none is used twice in a stream."""


class EngineWorker(ABC):
    """One rank. `number` names it to the sidecar."""

    def __init__(self, number: int, regions: Sequence[Region], engine_pid: int) -> None:
        """Raises `RegionError` for a pool on several GPUs."""
        self.number = number
        self.gpu = gpu_of(regions)
        """Whose memory the pool is in, by UUID; empty: the host's."""
        self._pages = tuple(regions)
        self._engine_pid = engine_pid
        self.is_quiet = True
        """After `close`: whether nothing can land in the pool any more."""
        self._stream: EngineStream | None = None
        self._refusal: PdlinkError | None = None
        self._closed = False

    @property
    @abstractmethod
    def name(self) -> str:
        """What it is, for people."""

    @abstractmethod
    def message(self, told: wire.PoolTold) -> pb.EngineMessage:
        """What attaches it. Raises `RegionError` for a pool that a sidecar cannot map."""

    def event_handles(self) -> Sequence[bytes]:
        """Of the events that publications name."""
        return ()

    def attach(self, stream: EngineStream) -> None:
        """Have the sidecar map the pool and serve the rank. Raises what it refuses with; that is kept for callers."""
        if self._closed:
            return
        try:
            self._attach(stream)
        except SidecarGone:
            raise
        except PeerGone as error:  # its process has ended, which the stream sees next
            raise SidecarGone(str(error)) from error
        except PdlinkError as error:
            self._refusal = error
            raise
        self._refusal, self._stream = None, stream

    def _attach(self, stream: EngineStream) -> None:
        shown = show(self._pages)
        try:
            ticket = hand_over(stream.handover, shown.descriptors) if shown.descriptors else b""
            told = wire.PoolTold(self._engine_pid, shown.blocks, ticket, self.event_handles())
            stream.call(self.message(told), timeout_s=ATTACH_TIMEOUT_S)
        finally:
            shown.close()

    def stream(self) -> EngineStream:
        """Where it is attached. Raises `SidecarGone` while it is not, `StateError` after `close`."""
        if self._closed:
            raise StateError(f"{self.name} is closed")
        stream = self._stream
        if stream is None or stream.is_over:
            why = f"it was refused when it came back: {self._refusal}" if self._refusal else "it goes back by itself"
            raise SidecarGone(f"{self.name} is not attached to its sidecar now; {why}")
        return stream

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def standing(self) -> str:
        """What is wrong, or nothing."""
        try:
            self.stream()
        except PdlinkError as error:
            return str(error)
        return ""

    def next_number(self) -> int:
        return next(_numbers)

    def detach(self) -> None:
        """Have the sidecar let go of the pool. Twice is fine; where no sidecar is, there is nothing to do."""
        if self._closed:
            return
        self._closed = True
        stream = self._stream
        if stream is None:
            return
        try:
            message = pb.EngineMessage(detach=pb.Detach(worker=self.number))
            self.is_quiet = stream.call(message, timeout_s=DETACH_TIMEOUT_S).quiet
        except SidecarGone:
            stream.wait_ended()  # its process is no more, so that nothing lands
