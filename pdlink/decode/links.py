"""Owns what a decode worker knows of one prefill instance: its ranks, plans, channels and pullers, and their renewal.

A link is made on the first request to an instance and costs nothing after that; a watch replaces it when ranks come, go
or restart. One that no request has used for a while is closed with its watch, sockets and threads, and so is the one
that was not used for longest when there would be more ranks than `max_peers`. It holds no request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from pdlink.address import Address
from pdlink.backends.base import Backend
from pdlink.backends.page_digests import PageDigests
from pdlink.backends.staging import Arena
from pdlink.bootstrap import compat
from pdlink.bootstrap.client import BootstrapClient
from pdlink.bootstrap.messages import PrefillServerInfo, RankInfo, Side
from pdlink.bootstrap.refusals import IncompatibleInstance
from pdlink.bootstrap.watch import Watch
from pdlink.config import Settings
from pdlink.control.frames import Frame
from pdlink.control.loop import Channel, ControlLoop
from pdlink.decode.actions import MergePlan
from pdlink.decode.facts import DecodeFacts
from pdlink.decode.puller import Puller
from pdlink.decode.way_picker import WayPicker
from pdlink.errors import LimitReached, NotReady, PdlinkError, StateError
from pdlink.events import Events
from pdlink.layout.election import elect_aux_owner
from pdlink.threads import Death

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
    """One version of an instance. Immutable but for the plans that it caches per dp group, and for its users."""

    def __init__(self, info: PrefillServerInfo, ranks: Mapping[str, RankLink], facts: DecodeFacts) -> None:
        self.info = info
        self._facts = facts
        self.ranks = ranks
        self.num_users = 0
        """Requests that have taken it and not given it back. Under the table's lock, as `used_at` is."""
        self.used_at = time.monotonic()
        self._plans: dict[int, MergePlan] = {}

    def plan(self, dp: int) -> MergePlan:
        """The merge plan for requests of dp group `dp`. Raises `InvalidInput` when there is no such group."""
        if dp not in self._plans:
            planner = self._facts.planner(self.info, dp)
            ranks = [rank for rank in self.info.ranks if rank.coordinates.dp == dp]
            elected = elect_aux_owner(self.info.layout, self.info.layer_plan(), dp)
            names = {rank.coordinates: rank.worker_id for rank in ranks}
            incarnations = {rank.worker_id: rank.incarnation for rank in ranks}
            self._plans[dp] = MergePlan(planner, incarnations, names[elected])
        return self._plans[dp]


class LinkTable:
    """All links of a decode worker. Thread-safe; `close` twice is fine. `owner` is the part of the process that their
    threads belong to; `on_dead` is told of a puller whose thread has died, on that thread."""

    def __init__(
        self,
        facts: DecodeFacts,
        side: Side,
        settings: Settings,
        loop: ControlLoop,
        backends: Mapping[str, Backend],
        events: Events,
        on_frame: Callable[[str, Frame], None],
        on_replaced: Callable[[PrefillInstance, Mapping[str, int]], None],
        on_dead: Callable[[RankLink, Death], None],
        arena: Arena | None,
        owner: str,
    ) -> None:
        self._arena = arena
        self._owner = owner
        self._on_dead = on_dead
        self._has_dead = False
        self._facts = facts
        self._side = side
        self._settings = settings
        self._loop = loop
        self._backends = backends
        self._events = events
        self._on_frame = on_frame
        self._on_replaced = on_replaced
        self._links: dict[PrefillInstance, Link] = {}
        self._clients: dict[tuple[Address, ...], BootstrapClient] = {}
        self._watched: dict[PrefillInstance, Watch] = {}
        self._forgotten: dict[PrefillInstance, float] = {}
        """Watched instances without a link, and since when."""
        self._absent: dict[PrefillInstance, str] = {}
        """Watched instances that the bootstrap does not know (whole) any more, and what it says of them."""
        self._retired: set[RankLink] = set()
        self._replaced: set[Link] = set()
        """Links that are not current any more and have users."""
        self._digester = PageDigests()
        """One for all, since what it holds of a device is much."""
        self._lock = threading.RLock()
        self._closed = False

    def known(self, instance: PrefillInstance) -> Link | None:
        return self._links.get(instance)

    def take(self, instance: PrefillInstance) -> Link | None:
        """The link for a request, if there is one: it stays open until `give_back`."""
        with self._lock:
            link = self._links.get(instance)
            if link:
                link.num_users += 1
            return link

    def share(self, link: Link) -> None:
        """Take a link once more that the caller has: current or not, it stays open until this is given back, too."""
        with self._lock:
            link.num_users += 1

    def give_back(self, link: Link) -> None:
        with self._lock:
            link.num_users -= 1
            link.used_at = time.monotonic()
            if not link.num_users:
                self._replaced.discard(link)

    def place(self, instance: PrefillInstance, link: Link, worker_id: str) -> str:
        """Where a rank of `link` is dialled, and whether the directory still lists that process."""
        rank = link.ranks[worker_id].rank
        with self._lock:
            said, current = self._absent.get(instance), self._links.get(instance)
        text = f"was dialled at {rank.control_endpoint}"
        if said:
            return f"{text} and has withdrawn, or its instance is not whole: {said}"
        if current and rank not in current.info.ranks:
            return f"{text} and has withdrawn: the bootstrap does not list that process any more"
        return text

    def death_in(self, link: Link) -> Death | None:
        """Why a link serves no request any more, where one of its threads has died."""
        if not self._has_dead:
            return None
        return next((one.puller.death for one in link.ranks.values() if one.puller.death), None)

    def resolve(self, instance: PrefillInstance) -> Link:
        """Ask the bootstrap services and make the link (blocks up to `resolve_timeout_s`), taken as by `take`.

        Raises what `BootstrapClient.wait_ready` does, `IncompatibleInstance` included, `LimitReached` where `max_peers`
        ranks are in use, and `StateError` once closed.
        """
        client = self._client(instance.bootstraps)
        info = client.wait_ready(instance.name, self._side.fingerprint, self._settings.resolve_timeout_s)
        link = self._install(instance, info, num_users=1)
        try:
            self._tell_replaced(instance, info)
            self._watch(instance, client)
        except BaseException:
            self.give_back(link)
            raise
        return link

    def _watch(self, instance: PrefillInstance, client: BootstrapClient) -> None:
        with self._lock:
            if instance in self._watched or instance not in self._links or self._closed:
                return
            if len(self._watched) >= self._settings.max_peers:
                self._drop_forgotten(time.monotonic())
            self._watched[instance] = client.watch(
                instance.name,
                self._side.fingerprint,
                lambda answer: self._on_answer(instance, answer),
                lambda death: self._unwatch(instance),
            )

    def forget(self, instance: PrefillInstance) -> None:
        """Resolve again on the next request."""
        with self._lock:
            link = self._links.pop(instance, None)
            if link:
                self._retire(link)
            if instance in self._watched:
                self._forgotten.setdefault(instance, time.monotonic())

    def sweep(self) -> None:
        """Close links that no request has used for a while, and what was replaced and serves no request any more."""
        with self._lock:
            long_ago = time.monotonic() - self._settings.link_idle_timeout_s
            unused = [one for one, link in self._links.items() if not link.num_users and link.used_at < long_ago]
            for instance in unused:
                log.info("the link to prefill instance %s is closed: no request has used it", instance.name)
                self._drop(instance)
            self._drop_forgotten(long_ago)
            self._stop_unheld()

    def close(self) -> bool:
        """End channels, watches and pullers; whether every pull is quiet (else a backend is stuck, and that is
        logged)."""
        with self._lock:
            self._closed = True
            clients, watches = list(self._clients.values()), list(self._watched.values())
            self._clients, self._watched = {}, {}
            ranks = {id(one): one for link in self._links.values() for one in link.ranks.values()}
            ranks |= {id(one): one for one in self._retired}
            self._links, self._retired = {}, set()
        for client in clients:
            client.close()
        for watch in watches:
            watch.close()
        for one in ranks.values():
            one.stop()
        give_up = time.monotonic() + self._settings.drain_timeout_s + CLOSE_SLACK_S
        stuck = [name for name, one in ranks.items() if not one.puller.join(max(0.0, give_up - time.monotonic()))]
        for name in stuck:
            log.error("pulls from %s are not quiet: its backend does not return", ranks[name].rank.worker_id)
        if not stuck:
            self._digester.close()
        return not stuck

    def _retire(self, link: Link) -> None:
        """Under the lock. A link that is current no more; its ranks go when nothing holds them."""
        self._retired.update(link.ranks.values())
        if link.num_users:
            self._replaced.add(link)

    def _stop_unheld(self, kept: Collection[RankLink] = ()) -> None:
        """Under the lock: stop retired ranks that are in no link with users, nor in `kept`."""
        if not self._retired:
            return
        held = {one for link in (*self._replaced, *self._links.values()) for one in link.ranks.values()} | set(kept)
        idle, self._retired = self._retired - held, self._retired & held
        for one in idle:
            one.stop()

    def _drop(self, instance: PrefillInstance) -> None:
        """Forget an instance that no request uses, and follow it no longer. Under the lock."""
        self.forget(instance)
        self._forgotten.pop(instance, None)
        self._absent.pop(instance, None)
        if watch := self._watched.pop(instance, None):
            watch.stop()
        if not any(one.bootstraps == instance.bootstraps for one in self._watched):
            self._clients.pop(instance.bootstraps, None)

    def _drop_forgotten(self, until: float) -> None:
        """Under the lock: follow no instance any more that went away before `until` and has not come back."""
        for instance in [one for one, since in self._forgotten.items() if since <= until]:
            self._drop(instance)

    def _unwatch(self, instance: PrefillInstance) -> None:
        """Its watch has died: what it said last may be out of date, so the next request asks, and watches anew."""
        with self._lock:
            self._watched.pop(instance, None)
            self._forgotten.pop(instance, None)
            self._absent.pop(instance, None)
            self.forget(instance)

    def _make_room(self, num_new: int, meant: PrefillInstance, kept: Collection[RankLink]) -> None:
        """Drop links that no request uses, the one unused for longest first, until `num_new` ranks more of the instance
        that is `meant` may be linked. Under the lock. Raises `LimitReached`."""
        most = self._settings.max_peers
        while (held := self._num_ranks()) + num_new > most:
            unused = [
                (one.used_at, other) for other, one in self._links.items() if not one.num_users and other != meant
            ]
            if not unused:
                raise LimitReached(
                    f"{held} prefill ranks are linked and in use, and {num_new} more would exceed PDLINK_MAX_PEERS="
                    f"{most}, or what the limit of open files leaves of it; raise both, or send fewer requests at once"
                )
            _, oldest = min(unused, key=lambda one: one[0])
            log.info("the link to prefill instance %s is closed to make room (PDLINK_MAX_PEERS=%d)", oldest.name, most)
            self._drop(oldest)
            self._stop_unheld(kept)

    def levels(self) -> dict[str, int]:
        """Prefill ranks by what they are to this side, and the pulls from them that are under way."""
        with self._lock:
            ranks = {one for link in self._links.values() for one in link.ranks.values()}.union(self._retired)
        dead = sum(one.puller.death is not None for one in ranks)
        connected = sum(one.puller.is_connected and one.puller.death is None for one in ranks)
        states = {"peers_linked": len(ranks) - dead - connected, "peers_connected": connected, "peers_dead": dead}
        return states | {"pulls_in_flight": sum(one.puller.num_under_way for one in ranks)}

    def _num_ranks(self) -> int:
        linked = {one for link in self._links.values() for one in link.ranks.values()}
        return len(linked.union(self._retired))

    def _client(self, bootstraps: tuple[Address, ...]) -> BootstrapClient:
        with self._lock:
            self._check_open()
            if bootstraps not in self._clients:
                if len(self._clients) >= self._settings.max_peers:  # those that have never led anywhere
                    used = {one.bootstraps for one in self._watched}
                    self._clients = {where: client for where, client in self._clients.items() if where in used}
                self._clients[bootstraps] = BootstrapClient(
                    bootstraps, self._settings, protocol=self._side.protocol, events=self._events
                )
            return self._clients[bootstraps]

    def _on_answer(self, instance: PrefillInstance, answer: PrefillServerInfo | PdlinkError) -> None:
        try:
            if isinstance(answer, PdlinkError):
                raise answer
            with self._lock:
                is_watched = instance in self._watched
            if is_watched:
                self._install(instance, answer)
                self._tell_replaced(instance, answer)
        except PdlinkError as error:
            log.info("prefill instance %s: %s", instance.name, error)
            with self._lock:
                if isinstance(error, NotReady) and instance in self._watched:
                    self._absent[instance] = str(error)
            # Requests that run keep their channels; new ones resolve, and are told why it does not work.
            self.forget(instance)

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the decode worker is closed")

    def _tell_replaced(self, instance: PrefillInstance, info: PrefillServerInfo) -> None:
        self._on_replaced(instance, {rank.worker_id: rank.incarnation for rank in info.ranks})

    def _install(self, instance: PrefillInstance, info: PrefillServerInfo, num_users: int = 0) -> Link:
        """Install `info` with users, keeping the channels and pullers of ranks that are still the same process."""
        mismatches = (
            compat.check_body(info, self._facts.layout)
            or compat.check_parts(info, self._facts.layout, self._facts.parts, self._settings)
            or compat.check_control_keys(info, self._settings)
        )
        if mismatches:
            raise IncompatibleInstance(mismatches, info.instance, [rank.endpoint for rank in info.ranks])
        with self._lock:
            self._check_open()
            old = self._links.get(instance)
            if old and old.info == info:
                old.num_users += num_users
                return old
            kept = _kept(info.ranks, [*self._retired, *(old.ranks.values() if old else ())])
            new = [rank for rank in info.ranks if rank.worker_id not in kept]
            if new:
                self._stop_unheld(kept.values())
                self._make_room(len(new), instance, kept.values())
            try:
                for rank in new:
                    kept[rank.worker_id] = self._connect(rank)
            except PdlinkError:
                self._retired.update(kept.values())
                raise
            link = Link(info, {rank.worker_id: kept[rank.worker_id] for rank in info.ranks}, self._facts)
            link.num_users = num_users
            if old:
                link.used_at = time.monotonic() if num_users else old.used_at
                self._retire(old)
            self._links[instance] = link
            self._forgotten.pop(instance, None)
            self._absent.pop(instance, None)
            self._retired.difference_update(link.ranks.values())
        return link

    def _connect(self, rank: RankInfo) -> RankLink:
        def heard(frame: Frame) -> None:
            self._on_frame(rank.worker_id, frame)

        channel = self._loop.connect(rank.control_endpoint, heard, rank.control_keys)
        ways = WayPicker(rank, self._settings, self._arena, self._events)
        told = (self._owner, lambda death: self._lose(link, death), self._digester)
        puller = Puller(rank, self._backends, self._settings, self._loop.call_soon, ways, self._events, *told)
        link: RankLink = RankLink(rank, channel, puller)
        return link

    def _lose(self, link: RankLink, death: Death) -> None:
        self._has_dead = True
        self._on_dead(link, death)


def _kept(ranks: Sequence[RankInfo], known: Sequence[RankLink]) -> dict[str, RankLink]:
    """Worker id -> its link, for the ranks that are still the very same process as one that is known."""
    links: dict[str, list[RankLink]] = {}
    for one in known:
        links.setdefault(one.rank.worker_id, []).append(one)
    found = {}
    for rank in ranks:
        same = next((one for one in links.get(rank.worker_id, ()) if one.rank == rank), None)
        if same:
            found[rank.worker_id] = same
    return found
