"""Owns what one process needs of pdlink, put together: settings, control loop, backends, and the workers made of them.

This is the front door for an engine that embeds pdlink. It decides nothing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from pdlink import limits, threads
from pdlink.address import Address
from pdlink.backends.base import Backend
from pdlink.backends.registry import open_backends
from pdlink.backends.staging import Arena, open_arena
from pdlink.bootstrap.access import Access
from pdlink.bootstrap.messages import PROTOCOL, ProtocolRange
from pdlink.config import Settings, load_settings
from pdlink.control.loop import PART, ControlLoop
from pdlink.decode.worker import DecodeWorker
from pdlink.errors import ConfigError, StateError
from pdlink.events import Events
from pdlink.health import Health, HealthReport
from pdlink.layout.components import CacheLayout
from pdlink.layout.decode_plan import DecodePlace
from pdlink.layout.regions import MemoryKind, Region
from pdlink.prefill.rank import PrefillRank
from pdlink.prefill.worker import PrefillWorker
from pdlink.threads import Death

if TYPE_CHECKING:
    from pdlink.memory.layer_reader import LayerReader
    from pdlink.memory.sharded_pool import LayerShardedPool
    from pdlink.observability.pool_watch import PoolWatch
    from pdlink.observability.tracing import Tracing
    from pdlink.observability.watch import Watch

log = logging.getLogger("pdlink.runtime")

FEW_PEERS = 64
"""A limit of open files that leaves room for fewer than these is worth a warning."""


class Node:
    """One process: an I/O thread, the configured backends, and any number of prefill and decode workers.

    Raises `ConfigError` for unusable settings, more peers than this process may open files for among them, and
    `BackendUnavailable` when a named backend does not work here. `close` ends everything, workers first; twice is fine.
    """

    def __init__(self, settings: Settings | None = None, events: Events | None = None) -> None:
        settings = settings or load_settings()
        self.events = events or Events()
        self.backends: dict[str, Backend] = open_backends(settings.backends, settings)
        try:
            self.settings = _within_open_files(settings, self.backends)
            most = self.settings.max_queued_frames
            self._loop = ControlLoop(self.settings.max_frame_bytes, self.events, max_queued_frames=most).start()
        except BaseException:
            for backend in self.backends.values():
                backend.close()
            raise
        self._health = Health(self.events)
        self._health.add(PART)
        for name, backend in self.backends.items():
            self._health.add(backend_part(name))
            backend.on_death = partial(self._on_dead_backend, backend)
        self._workers: list[PrefillWorker | DecodeWorker] = []
        self._arenas: dict[tuple[str, MemoryKind, int], Arena | None] = {}
        self._closed = False
        self._pools: list[PoolWatch] = []
        self._watch: Watch | None = None
        self._tracing: Tracing | None = None
        try:
            self._tracing = self._trace() if self.settings.tracing else None
            self._watch = self._show(self.settings.http_bind) if self.settings.http_bind else None
        except BaseException:
            self.close()
            raise

    @property
    def loop(self) -> ControlLoop:
        return self._loop

    def health(self) -> HealthReport:
        """Whether every part of this process has all its threads and every prefill rank that was to register has, and
        what is wrong with each part that is not so."""
        return self._health.report()

    def readiness(self) -> HealthReport:
        """Whether this process can serve: as `standing`, and it has workers."""
        report = self.standing()
        reasons = [] if self._workers else ["this process has no prefill or decode worker yet"]
        return HealthReport(report.ok and not reasons, (*report.reasons, *reasons), report.parts)

    def standing(self) -> HealthReport:
        """Whether what this process has can serve: it is well, and every prefill rank that was to register has, with a
        transport that peers can use."""
        report = self._health.report()
        missing = {}
        for worker in self._workers:
            if isinstance(worker, PrefillWorker) and worker.was_told_to_register:
                text, _ = worker.standing()
                missing[worker.part] = text or ("" if worker.offered else f"{worker.part} offers no transport")
        reasons = [text for text in missing.values() if text and text not in report.reasons]
        reasons += ["this pdlink node is closed"] if self._closed else []
        parts = {**report.parts, **{name: text for name, text in missing.items() if text}}
        return HealthReport(not (report.reasons or reasons), (*report.reasons, *reasons), parts)

    def levels(self) -> dict[str, int]:
        """What there is at this moment in all workers together, by name."""
        told: Counter[str] = Counter()
        for worker in self._workers:
            told.update(worker.levels())
        return dict(told)

    def tell_levels(self) -> None:
        """Emit `levels` as the event `node.levels`, from which gauges are set. For whoever is scraped."""
        self.events.emit("node.levels", **self.levels())
        for pool in self._pools:
            pool.tell()

    def watch_pool(self, pool: LayerShardedPool) -> None:
        """Count what `pool` reads among this node's metrics, until the node is closed."""
        from pdlink.observability.pool_watch import PoolWatch

        self._pools.append(PoolWatch(pool, self.events))

    def watch_reader(self, reader: LayerReader) -> LayerReader:
        """`reader`, of which each fetch of a layer is timed among this node's metrics: give it to the pool instead."""
        from pdlink.observability.pool_watch import timed

        return timed(reader, self.events)

    @property
    def http_address(self) -> Address | None:
        """Where `/healthz`, `/readyz` and `/metrics` are, with `http_bind` set."""
        return self._watch.address if self._watch else None

    def prefill(
        self,
        rank: PrefillRank,
        bootstraps: Sequence[Address] = (),
        transports: Mapping[str, Backend] | None = None,
    ) -> PrefillWorker:
        """A prefill rank, which registers with every one of `bootstraps`. That goes on by itself and is not waited for:
        see `PrefillWorker.wait_registered`, `health` and the event `bootstrap.keeper`. `transports` are what it uses of
        this node's `backends`, as it uses them (default: all)."""
        loop = self._check_open()
        backends = self.backends if transports is None else transports
        arena = self._arena("prefill", rank.regions, backends) if rank.regions else None
        worker = PrefillWorker(rank, self.settings, loop, backends, self.events, arena)
        self._workers.append(worker)
        self._health.add(worker.part, worker.standing)
        if bootstraps:
            worker.register(bootstraps)
        return worker

    def decode(
        self,
        instance: str,
        layout: CacheLayout,
        regions: Sequence[Region],
        protocol: ProtocolRange = PROTOCOL,
        place: DecodePlace | None = None,
    ) -> DecodeWorker:
        """A decode rank that pulls into `regions`: all that `layout` has, or what it holds at `place`."""
        loop = self._check_open()
        Access(self.settings)  # credentials that cannot be used are refused now, not with the first request
        rest = (
            self.settings,
            loop,
            self.backends,
            self.events,
            protocol,
            self._arena("decode", regions, self.backends),
            place,
        )
        worker = DecodeWorker(instance, layout, regions, *rest)
        self._workers.append(worker)
        self._health.add(worker.part)
        return worker

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._watch:
            self._watch.close()
        for worker in reversed(self._workers):
            worker.close()
        self._loop.close()
        quiet = all(worker.is_quiet for worker in self._workers if isinstance(worker, DecodeWorker))
        for arena in self._arenas.values() if quiet else ():  # else something may still land in a slot
            if arena:
                arena.close()
        for backend in self.backends.values():
            backend.close()
        self._health.close()
        if self._tracing:
            self._tracing.close()

    def _trace(self) -> Tracing:
        from pdlink.observability.tracing import Tracing

        return Tracing(self.events)

    def _show(self, bind: str) -> Watch:
        """Serve health and metrics. Imported here: nobody else needs what it needs."""
        from pdlink.observability.http import Answer
        from pdlink.observability.watch import Watch

        def answer(report: HealthReport) -> Answer:
            return Answer(report.ok, report.reasons, report.parts)

        probes = (lambda: answer(self.health()), lambda: answer(self.readiness()))
        return Watch(bind, self.events, *probes, self.tell_levels)

    def _on_dead_backend(self, backend: Backend, death: Death) -> None:
        """A thread that serves peers' reads has died: what prefill ranks here publish can no longer be relied on."""
        threads.announce(death, self.events)
        for worker in self._workers:
            if isinstance(worker, PrefillWorker) and backend.name in worker.offered:
                worker.on_death(death)

    def _arena(self, role: str, regions: Sequence[Region], backends: Mapping[str, Backend]) -> Arena | None:
        """The staging memory of a role, where the regions are. Each role has its own: while decode waits for an owner
        elsewhere, it must not hold what the owners here need to serve others."""
        places = {(region.memory, region.device) for region in regions} or {(MemoryKind.HOST, 0)}
        if len(places) > 1:
            named = ", ".join(sorted(f"{memory} device {device}" for memory, device in places))
            log.warning("pages of a %s worker lie in %s: they move without staging, which packs one kind", role, named)
            return None
        ((memory, device),) = places
        if (role, memory, device) not in self._arenas:
            self._arenas[role, memory, device] = open_arena(self.settings, backends, memory, device)
        return self._arenas[role, memory, device]

    def _check_open(self) -> ControlLoop:
        if self._closed:
            raise StateError("this pdlink node is closed")
        return self._loop

    def __enter__(self) -> Node:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def backend_part(name: str) -> str:
    """What threads of a backend belong to, by the name that health and logs know."""
    return f"backend {name}"


def _within_open_files(settings: Settings, backends: Mapping[str, Backend]) -> Settings:
    """Settings whose `max_peers` fit into the files that this process may open. Raises `ConfigError` where they were
    set to more; the default is lowered to what fits."""
    num_used, limit = limits.num_open(), limits.soft_limit()
    per_peer = limits.FILES_PER_LINK + max(one.capabilities.files_per_peer for one in backends.values())
    fits = limits.peers_within(limit, num_used, per_peer)
    if settings.max_peers <= fits:
        return settings
    needed = limits.files_for(settings.max_peers, num_used, per_peer)
    text = (
        f"PDLINK_MAX_PEERS={settings.max_peers} needs {needed} open files ({per_peer} a peer over "
        f"{', '.join(backends)}) and this process may open {limit}"
    )
    if "max_peers" in settings.model_fields_set:
        raise ConfigError(f"{text}; raise the limit (ulimit -n {needed}), or lower the setting to at most {fits}")
    level = logging.WARNING if fits < FEW_PEERS else logging.INFO
    log.log(level, "%s: at most %d are linked at once; raise the limit (ulimit -n %d) for more", text, fits, needed)
    return settings.model_copy(update={"max_peers": fits})
