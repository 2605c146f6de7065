"""Owns what backends have in common that stand before another one: every call is handed on to it."""

from __future__ import annotations

from pdlink.backends.base import Backend, Peer, PullHandle, PullStatus, Settled
from pdlink.layout.regions import Region
from pdlink.transfer.descriptors import PullBatch


class WrappedBackend(Backend):
    """`inner`, under its own name. Subclasses do otherwise where they differ."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.name = inner.name
        self.capabilities = inner.capabilities

    def register(self, region: Region) -> None:
        self.inner.register(region)

    def deregister(self, region: Region) -> None:
        self.inner.deregister(region)

    def endpoint(self) -> bytes:
        return self.inner.endpoint()

    def connect(self, peer: Peer) -> None:
        self.inner.connect(peer)

    def disconnect(self, peer: Peer) -> None:
        self.inner.disconnect(peer)

    def submit(self, batch: PullBatch) -> PullHandle:
        return self.inner.submit(batch)

    def poll(self, handle: PullHandle) -> PullStatus:
        return self.inner.poll(handle)

    def settle(self, handle: PullHandle) -> Settled:
        return self.inner.settle(handle)

    def fence(self, peer: Peer) -> tuple[str, ...]:
        return self.inner.fence(peer)

    def serve(self, owner: str, num_readers: int) -> None:
        self.inner.serve(owner, num_readers)

    def close(self) -> None:
        self.inner.close()
