"""Owns how a transport is used beside an engine: only the sidecar's own staging memory is registered with it.

Memory that was imported from another process cannot be registered again in general, and what is registered would pin
the engine's pages beyond the engine's life.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pdlink.backends.base import Backend, Peer, PullHandle, PullStatus, Settled
from pdlink.layout.regions import Region
from pdlink.transfer.descriptors import PullBatch


class StagedOnly(Backend):
    """`inner` without the regions that `is_engines` says yes to.

    So `direct` stays off over it, whatever a driver may take: that it registers a mapping does not prove that a peer's
    reads of it arrive.
    """

    def __init__(self, inner: Backend, is_engines: Callable[[Region], bool]) -> None:
        self.name = inner.name
        self.capabilities = replace(inner.capabilities, staged_only=True, gathers=False)
        self._inner = inner
        self._is_engines = is_engines

    def register(self, region: Region) -> None:
        if not self._is_engines(region):
            self._inner.register(region)

    def deregister(self, region: Region) -> None:
        if not self._is_engines(region):
            self._inner.deregister(region)

    def endpoint(self) -> bytes:
        return self._inner.endpoint()

    def connect(self, peer: Peer) -> None:
        self._inner.connect(peer)

    def disconnect(self, peer: Peer) -> None:
        self._inner.disconnect(peer)

    def submit(self, batch: PullBatch) -> PullHandle:
        return self._inner.submit(batch)

    def poll(self, handle: PullHandle) -> PullStatus:
        return self._inner.poll(handle)

    def settle(self, handle: PullHandle) -> Settled:
        return self._inner.settle(handle)

    def fence(self, peer: Peer) -> tuple[str, ...]:
        return self._inner.fence(peer)

    def serve(self, owner: str, num_readers: int) -> None:
        self._inner.serve(owner, num_readers)

    def close(self) -> None:
        self._inner.close()
