"""Owns what one process needs of pdlink, put together: settings, control loop, backends, and the workers made of them.

This is the front door for an engine that embeds pdlink. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from pdlink.address import Address
from pdlink.backends.base import Backend
from pdlink.backends.registry import open_backends
from pdlink.backends.staging import Arena, open_arena
from pdlink.bootstrap.messages import PROTOCOL, ProtocolRange
from pdlink.config import Settings, load_settings
from pdlink.control.loop import ControlLoop
from pdlink.decode.worker import DecodeWorker
from pdlink.errors import StateError
from pdlink.events import Events
from pdlink.layout.components import CacheLayout
from pdlink.layout.regions import Region
from pdlink.prefill.worker import PrefillRank, PrefillWorker


class Node:
    """One process: an I/O thread, the configured backends, and any number of prefill and decode workers.

    Raises `ConfigError` for unusable settings and `BackendUnavailable` when a named backend does not work here. `close`
    ends everything, workers first; twice is fine.
    """

    def __init__(self, settings: Settings | None = None, events: Events | None = None) -> None:
        self.settings = settings or load_settings()
        self.events = events or Events()
        self.backends: dict[str, Backend] = open_backends(self.settings.backends, self.settings)
        self._loop = ControlLoop(self.settings.max_frame_bytes, self.events).start()
        self._workers: list[PrefillWorker | DecodeWorker] = []
        self._arenas: dict[str, Arena | None] = {}
        self._closed = False

    @property
    def loop(self) -> ControlLoop:
        return self._loop

    def prefill(self, rank: PrefillRank, bootstraps: Sequence[Address] = ()) -> PrefillWorker:
        """A prefill rank, which registers with every one of `bootstraps`."""
        loop = self._check_open()
        arena = self._arena("prefill") if rank.regions else None
        worker = PrefillWorker(rank, self.settings, loop, self.backends, self.events, arena)
        self._workers.append(worker)
        if bootstraps:
            worker.register(bootstraps)
        return worker

    def decode(
        self, instance: str, layout: CacheLayout, regions: Sequence[Region], protocol: ProtocolRange = PROTOCOL
    ) -> DecodeWorker:
        """A decode rank that pulls into `regions`."""
        loop = self._check_open()
        rest = (self.settings, loop, self.backends, self.events, protocol, self._arena("decode"))
        worker = DecodeWorker(instance, layout, regions, *rest)
        self._workers.append(worker)
        return worker

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for worker in reversed(self._workers):
            worker.close()
        self._loop.close()
        quiet = all(worker.is_quiet for worker in self._workers if isinstance(worker, DecodeWorker))
        for arena in self._arenas.values() if quiet else ():  # else something may still land in a slot
            if arena:
                arena.close()
        for backend in self.backends.values():
            backend.close()

    def _arena(self, role: str) -> Arena | None:
        """The staging memory of a role. Each has its own: while decode waits for an owner elsewhere, it must not hold
        what the owners here need to serve others."""
        if role not in self._arenas:
            self._arenas[role] = open_arena(self.settings, self.backends)
        return self._arenas[role]

    def _check_open(self) -> ControlLoop:
        if self._closed:
            raise StateError("this pdlink node is closed")
        return self._loop

    def __enter__(self) -> Node:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
