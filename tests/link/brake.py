"""Owns a backend that lets a pull begin, holds it in the middle, and knows what is still on the wire."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pdlink.backends.base import Backend, Peer, PullHandle, PullStatus, Settled
from pdlink.transfer.descriptors import PullBatch
from tests.link.rig import Gate


class Brake(Gate):
    """Everything is the inner backend's; but once `has_landed`, no pull gets on before `open` is set.

    What the engine had posted until then goes on by itself, where it is of that kind.
    """

    def __init__(self, inner: Backend, has_landed: Callable[[], bool]) -> None:
        super().__init__(inner)
        self.has_landed = has_landed
        self.caught = threading.Event()
        """Set while pulls are held."""
        self._on_wire: dict[int, PullHandle] = {}

    @property
    def is_quiet(self) -> bool:
        """Whether every pull is done, or was said to be quiet, or fenced."""
        return not self._on_wire

    def submit(self, batch: PullBatch) -> PullHandle:
        handle = super().submit(batch)
        self._on_wire[id(handle)] = handle
        return handle

    def poll(self, handle: PullHandle) -> PullStatus:
        if not self.open.is_set():
            if not self.caught.is_set() and self.has_landed():
                self.caught.set()
            if self.caught.is_set() and not self.open.wait(0.01):
                return PullStatus.PENDING
        status = self.inner.poll(handle)
        if status is PullStatus.DONE:
            self._on_wire.pop(id(handle), None)
        return status

    def settle(self, handle: PullHandle) -> Settled:
        settled = super().settle(handle)
        if settled is Settled.QUIET:
            self._on_wire.pop(id(handle), None)
        return settled

    def fence(self, peer: Peer) -> tuple[str, ...]:
        broken = super().fence(peer)
        for handle in [one for one in self._on_wire.values() if one.batch.worker_id in broken]:
            del self._on_wire[id(handle)]
        return broken
