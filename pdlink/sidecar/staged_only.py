"""Owns how a transport is used beside an engine: only the sidecar's own staging memory is registered with it.

Memory that was imported from another process cannot be registered again in general, and what is registered would pin
the engine's pages beyond the engine's life.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pdlink.backends.base import Backend
from pdlink.backends.wrapped import WrappedBackend
from pdlink.layout.regions import Region


class StagedOnly(WrappedBackend):
    """`inner` without the regions that `is_engines` says yes to.

    So `direct` stays off over it, whatever a driver may take: that it registers a mapping does not prove that a peer's
    reads of it arrive.
    """

    def __init__(self, inner: Backend, is_engines: Callable[[Region], bool]) -> None:
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, staged_only=True, gathers=False)
        self._is_engines = is_engines

    def register(self, region: Region) -> None:
        if not self._is_engines(region):
            self.inner.register(region)

    def deregister(self, region: Region) -> None:
        if not self._is_engines(region):
            self.inner.deregister(region)
