"""Owns what a decode worker knows of one prefill instance: its ranks, plans, channels and pullers, and their renewal.

A link is made on the first request to an instance and costs nothing after that; a watch replaces it when ranks come, go
or restart. It holds no request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from pdlink.address import Address
from pdlink.backends.base import Backend
from pdlink.backends.staging import Arena
from pdlink.bootstrap import compat
from pdlink.bootstrap.client import BootstrapClient
from pdlink.bootstrap.messages import PrefillServerInfo, RankInfo, Side
from pdlink.bootstrap.refusals import IncompatibleInstance
from pdlink.config import Settings
from pdlink.control.frames import Frame
from pdlink.control.loop import Channel, ControlLoop
from pdlink.decode.actions import MergePlan
from pdlink.decode.puller import Puller
from pdlink.decode.way_picker import WayPicker
from pdlink.errors import InvalidInput, PdlinkError, StateError
from pdlink.events import Events
from pdlink.layout.components import CacheLayout
from pdlink.layout.election import elect_aux_owner
from pdlink.layout.regions import Region
from pdlink.transfer.planner import PullPlanner, Source

log = logging.getLogger("pdlink.decode")

CLOSE_SLACK_S = 5.0
"""Longer than one blocking call of a backend, on top of the time in which its pulls must be quiet."""


@dataclass(frozen=True, slots=True)
class PrefillInstance:
    """Where a request's prefill is: the instance's name, and any of its bootstrap addresses."""

    name: str
    bootstraps: tuple[Address, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RankLink:
    """The channel to one process of one prefill rank, and the thread that pulls from it."""

    rank: RankInfo
    channel: Channel
    puller: Puller

    def stop(self) -> None:
        """Close the channel and end the puller after its jobs; returns at once."""
        self.channel.close()
        self.puller.stop()


class Link:
    """One version of an instance. Immutable but for the plans that it caches per dp group."""

    def __init__(self, info: PrefillServerInfo, ranks: Mapping[str, RankLink]) -> None:
        self.info = info
        self.ranks = ranks
        self._plans: dict[int, MergePlan] = {}

    def plan(self, dp: int, layout: CacheLayout, regions: Sequence[Region]) -> MergePlan:
        """The merge plan for requests of dp group `dp`. Raises `InvalidInput` when there is no such group."""
        if dp not in self._plans:
            if not 0 <= dp < self.info.sizes.dp:
                raise InvalidInput(f"dp={dp} is outside the {self.info.sizes.dp} dp groups of {self.info.instance!r}")
            ranks = [rank for rank in self.info.ranks if rank.coordinates.dp == dp]
            planner = PullPlanner(layout, [Source(rank.worker_id, rank.regions) for rank in ranks], regions)
            elected = elect_aux_owner(self.info.layout, self.info.layer_plan(), dp)
            names = {rank.coordinates: rank.worker_id for rank in ranks}
            incarnations = {rank.worker_id: rank.incarnation for rank in ranks}
            self._plans[dp] = MergePlan(planner, incarnations, names[elected])
        return self._plans[dp]


class LinkTable:
    """All links of a decode worker. Thread-safe; `close` twice is fine."""

    def __init__(
        self,
        layout: CacheLayout,
        side: Side,
        settings: Settings,
        loop: ControlLoop,
        backends: Mapping[str, Backend],
        events: Events,
        on_frame: Callable[[str, Frame], None],
        on_replaced: Callable[[PrefillInstance, Mapping[str, int]], None],
        arena: Arena | None = None,
    ) -> None:
        self._arena = arena
        self._layout = layout
        self._side = side
        self._settings = settings
        self._loop = loop
        self._backends = backends
        self._events = events
        self._on_frame = on_frame
        self._on_replaced = on_replaced
        self._links: dict[PrefillInstance, Link] = {}
        self._clients: dict[tuple[Address, ...], BootstrapClient] = {}
        self._watched: set[PrefillInstance] = set()
        self._retired: list[RankLink] = []
        self._lock = threading.RLock()
        self._closed = False

    def known(self, instance: PrefillInstance) -> Link | None:
        return self._links.get(instance)

    def resolve(self, instance: PrefillInstance) -> Link:
        """Ask the bootstrap services and make the link (blocks up to `resolve_timeout_s`).

        Raises what `BootstrapClient.wait_ready` does, `IncompatibleInstance` included, and `StateError` once closed.
        """
        client = self._client(instance.bootstraps)
        info = client.wait_ready(instance.name, self._side.fingerprint, self._settings.resolve_timeout_s)
        link = self._take(instance, info)
        with self._lock:
            if instance not in self._watched and not self._closed:
                self._watched.add(instance)
                client.watch(instance.name, self._side.fingerprint, lambda answer: self._on_answer(instance, answer))
        return link

    def forget(self, instance: PrefillInstance) -> None:
        """Resolve again on the next request."""
        with self._lock:
            link = self._links.pop(instance, None)
            if link:
                self._retired.extend(link.ranks.values())

    def sweep(self, in_use: Collection[Link]) -> None:
        """Close what was replaced and serves none of the links in use."""
        with self._lock:
            held = {id(one) for link in (*in_use, *self._links.values()) for one in link.ranks.values()}
            idle = [one for one in self._retired if id(one) not in held]
            self._retired = [one for one in self._retired if id(one) in held]
        for one in idle:
            one.stop()

    def close(self) -> bool:
        """End channels, watches and pullers; whether every pull is quiet (else a backend is stuck, and that is
        logged)."""
        with self._lock:
            self._closed = True
            clients, self._clients = list(self._clients.values()), {}
            ranks = {id(one): one for link in self._links.values() for one in link.ranks.values()}
            ranks |= {id(one): one for one in self._retired}
            self._links, self._retired = {}, []
        for client in clients:
            client.close()
        for one in ranks.values():
            one.stop()
        give_up = time.monotonic() + self._settings.drain_timeout_s + CLOSE_SLACK_S
        stuck = [name for name, one in ranks.items() if not one.puller.join(max(0.0, give_up - time.monotonic()))]
        for name in stuck:
            log.error("pulls from %s are not quiet: its backend does not return", ranks[name].rank.worker_id)
        return not stuck

    def _client(self, bootstraps: tuple[Address, ...]) -> BootstrapClient:
        with self._lock:
            self._check_open()
            if bootstraps not in self._clients:
                self._clients[bootstraps] = BootstrapClient(
                    bootstraps, self._settings, protocol=self._side.protocol, events=self._events
                )
            return self._clients[bootstraps]

    def _on_answer(self, instance: PrefillInstance, answer: PrefillServerInfo | PdlinkError) -> None:
        try:
            if isinstance(answer, PdlinkError):
                raise answer
            self._take(instance, answer)
        except PdlinkError as error:
            log.info("prefill instance %s: %s", instance.name, error)
            # Requests that run keep their channels; new ones resolve, and are told why it does not work.
            self.forget(instance)

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the decode worker is closed")

    def _take(self, instance: PrefillInstance, info: PrefillServerInfo) -> Link:
        """Install `info`, keeping the channels and pullers of ranks that are still the same process."""
        link = self._install(instance, info)
        self._on_replaced(instance, {rank.worker_id: rank.incarnation for rank in info.ranks})
        return link

    def _install(self, instance: PrefillInstance, info: PrefillServerInfo) -> Link:
        mismatches = compat.check_body(info, self._layout)
        if mismatches:
            raise IncompatibleInstance(mismatches, info.instance, [rank.endpoint for rank in info.ranks])
        with self._lock:
            self._check_open()
            old = self._links.get(instance)
            if old and old.info == info:
                return old
            known = [*self._retired, *(old.ranks.values() if old else ())]
            ranks = {}
            for rank in info.ranks:
                kept = next((one for one in known if one.rank == rank), None)
                ranks[rank.worker_id] = kept or self._connect(rank)
            link = self._links[instance] = Link(info, ranks)
            self._retired = [one for one in known if ranks.get(one.rank.worker_id) is not one]
        return link

    def _connect(self, rank: RankInfo) -> RankLink:
        channel = self._loop.connect(rank.control_endpoint, lambda frame: self._on_frame(rank.worker_id, frame))
        ways = WayPicker(rank, self._settings, self._arena, self._events)
        return RankLink(rank, channel, Puller(rank, self._backends, self._settings, self._loop.call_soon, ways))
