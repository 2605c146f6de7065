"""Owns one topology at work: real workers of both sides over a quiet network, requests, and the check of every byte."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pdlink.backends.base import Backend
from pdlink.backends.staging import Arena
from pdlink.bootstrap import compat, service_wire
from pdlink.bootstrap.directory import Directory
from pdlink.bootstrap.messages import Side
from pdlink.config import Settings, load_settings
from pdlink.decode.links import PrefillInstance
from pdlink.decode.receiver import Receiver
from pdlink.decode.worker import DecodeWorker
from pdlink.errors import Mismatch
from pdlink.events import Events
from pdlink.layout import Component, DecodePlace, DecodeRank, Part, part_of
from pdlink.prefill.rank import PrefillRank
from pdlink.prefill.sender import Sender
from pdlink.prefill.worker import PrefillWorker
from pdlink.transfer.failure import FailureReason
from pdlink.transfer.states import ReceiverState, SenderState
from tests.topology.cache import GUARD_PAGES, Landed, Pool, Truth
from tests.topology.quiet import PATIENCE_S, Network, QuietLoop
from tests.topology.strategies import Ask, Case, Topology

INSTANCE = PrefillInstance("pre", ())
SPARE_PAGES = 3
SLOT_BYTES = 4096
NUM_SLOTS = 2
OpenBackend = Callable[[], Backend]


@dataclass
class Owner:
    worker: PrefillWorker
    pool: Pool
    parts: Mapping[str, Part]
    taken: dict[str, set[int]] = field(default_factory=dict)
    last: dict[str, list[int]] = field(default_factory=dict)
    """Pages of the newest request."""

    @property
    def dp(self) -> int:
        return self.worker.rank.rank.dp

    def take(self, num_pages: int, group: str, rng: random.Random) -> list[int]:
        """Pages of no other request."""
        taken = self.taken.setdefault(group, set())
        free = [page for page in range(self.pool.num_pages) if page not in taken]
        found = rng.sample(free, num_pages)
        taken.update(found)
        return found


@dataclass
class Taker:
    worker: DecodeWorker
    pool: Pool
    place: DecodePlace
    landed: Landed


@dataclass
class Asked:
    """One request under way."""

    name: str
    receivers: list[Receiver]
    senders: list[Sender]
    takers: list[Taker]
    """Of each receiver."""


class Site:
    """Both instances of a topology. `open_backend` makes the one that each side has."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        topology: Topology,
        num_pages: int,
        open_backend: OpenBackend,
        **settings: object,
    ) -> None:
        self.network = Network()
        self.topology = topology
        patient = {"staging_timeout_s": PATIENCE_S, "drain_timeout_s": PATIENCE_S}
        self.settings: Settings = load_settings({}, **(patient | settings))
        self._stack = stack
        self._loop: Any = QuietLoop(self.network)
        self._backends = [self._opened(open_backend) for _ in range(2)]
        directory = Directory(1000.0)
        self.owners = [self._owner(rank, num_pages) for rank in topology.plan.sizes.ranks()]
        for owner in self.owners:
            sent = service_wire.pack_registration(owner.worker.registration()).SerializeToString()
            message = service_wire.pb.Registration.FromString(sent)
            directory.register(service_wire.unpack_registration(message), 0.0)
        self.info = directory.resolve("pre", 0.0)
        self.takers = [self._taker(rank, num_pages) for rank in topology.taken.sizes.ranks()]

    def compare(self, decode: Side) -> tuple[Mismatch, ...]:
        """What a bootstrap, and each prefill rank, says of the two sides before anything else."""
        return compat.check(self.info.side, decode)

    def link(self) -> None:
        """Let decode know of prefill, as its bootstrap would. Raises what is raised then."""
        for taker in self.takers:
            assert not self.compare(taker.worker._side)
            link = taker.worker._links._install(INSTANCE, self.info)
            for one in link.ranks.values():  # so that small pulls need no thread
                one.puller._wire.connected()

    def receive(self, taker: Taker, name: str, ask: Ask, rng: random.Random) -> tuple[Receiver, dict[str, list[int]]]:
        pages, turns = {}, taker.place.sizes.dcp
        for group in taker.worker.layout.page_groups:
            size = group.page_size * turns
            first = ask.prefix_tokens // size
            wanted = 0 if ask.prefix_tokens == ask.num_tokens else -(-ask.num_tokens // size) - first
            pages[group.name] = rng.sample(range(taker.pool.num_pages), wanted)
        made = taker.worker.receive(
            name,
            INSTANCE,
            pages,
            ask.num_tokens,
            prefix_tokens=ask.prefix_tokens,
            dp=ask.dp,
            expect_aux=ask.seed % 2 == 1,
        )
        return made, pages

    def publish(self, name: str, ask: Ask, rng: random.Random) -> tuple[Truth, list[Sender], list[Callable[[], None]]]:
        """Open the request on the ranks of its dp group; returns what publishes it, call by call, in a random order."""
        groups = self.topology.prefill.page_groups
        truth = Truth(name, {group.name: group.num_pages(ask.num_tokens) for group in groups})
        senders, calls = [], []
        for owner in (one for one in self.owners if one.dp == ask.dp):
            pages = {group: owner.take(count, group, rng) for group, count in truth.num_pages.items()}
            owner.last = pages
            truth.fill(owner.pool, owner.parts, pages)
            sender = owner.worker.open(name)
            senders.append(sender)
            calls.append(_publishing(sender, pages, rng))
        order = [at for at, mine in enumerate(calls) for _ in mine]
        rng.shuffle(order)
        return truth, senders, [calls[at].pop(0) for at in order]

    def expect(self, taker: Taker, truth: Truth, ask: Ask, pages: Mapping[str, Sequence[int]]) -> None:
        """Note what a request must leave in a rank's pool."""
        if not any(pages.values()):
            return
        first = {
            group.name: ask.prefix_tokens
            // (group.page_size * taker.place.sizes.dcp)
            * group.page_size
            * taker.place.sizes.dcp
            for group in taker.worker.layout.page_groups
        }
        theirs = {one.name: one for one in self.topology.prefill.components}
        parts = taker.place.parts(taker.worker.layout)
        whole = {}
        for one in taker.worker.layout.components:
            if one.name in theirs:
                whole[one.name] = parts[one.name].token_count == 1 and self._has_like(one, parts[one.name])
        taker.landed.add(truth, parts, pages, first, whole)

    def _has_like(self, here: Component, part: Part) -> bool:
        """Whether a prefill rank has the same heads, in pages that look alike: then they go as they are."""
        tp = self.topology.plan.sizes.tp
        for rank, layout in enumerate(self.topology.prefills):
            there = layout.component(here.name)
            like = (there.fields, there.page_bytes) == (here.fields, here.page_bytes)
            if like and part_of(there, rank, tp) == part:
                return True
        return False

    def begin(self, name: str, ask: Ask, dp: int = 0, damage: Callable[[random.Random], None] | None = None) -> Asked:
        """One request by the ranks of decode group `dp`, some of which come before it is published and some after.

        `damage` is called once all is published, which then comes before the late ones or after them."""
        rng = random.Random(ask.seed)
        mine = [one for one in self.takers if one.place.rank.dp == dp]
        early = rng.sample(mine, rng.randint(0, len(mine)))
        asked = [(one, *self.receive(one, name, ask, rng)) for one in early]
        truth, senders, calls = self.publish(name, ask, rng)
        half = rng.randint(0, len(calls))
        if damage:
            half = rng.choice((half, len(calls)))
        for call in calls[:half]:
            call()
        if damage and half == len(calls):
            damage(rng)
        if rng.random() < 0.5:
            self.network.drain()
        asked += [(one, *self.receive(one, name, ask, rng)) for one in mine if one not in early]
        for call in calls[half:]:
            call()
        if damage and half < len(calls):
            damage(rng)
        for taker, _, pages in asked:
            self.expect(taker, truth, ask, pages)
        return Asked(name, [made for _, made, _ in asked], senders, [one for one, _, _ in asked])

    def finish(self, every: Sequence[Asked]) -> None:
        """All of them succeed on every rank, and every decode pool holds what it must and nothing else."""
        self.network.wait(lambda: not any(one.worker.num_receives for one in self.takers))
        for one in every:
            for made in one.receivers:
                assert made.state is ReceiverState.DONE, made.failure
                assert made.result().aux in (None, one.name.encode())
            assert {sender.poll() for sender in one.senders} == {SenderState.RELEASED}
        for owner in self.owners:
            owner.taken.clear()
        for taker in self.takers:
            wrong = taker.landed.find_wrong()
            assert not wrong, f"{self.topology}, decode {taker.place.rank}: {wrong}"

    def finish_damaged(self, asked: Asked) -> bool:
        """Nobody has other bytes than the right ones and calls that a success. Whether the damage was found."""
        self.network.wait(lambda: not any(one.worker.num_receives for one in self.takers))
        for taker, made in zip(asked.takers, asked.receivers, strict=True):
            wrong = taker.landed.find_wrong() if made.state is ReceiverState.DONE else ""
            assert not wrong, f"{self.topology}, decode {taker.place.rank}, which is done: {wrong}"
        failures = [one.failure for one in asked.receivers if one.failure]
        assert not failures or FailureReason.DIGEST in {one.reason for one in failures}, failures
        return bool(failures)

    def damage(self, dp: int, rng: random.Random) -> None:
        """Write one byte of a page of a request, in a field, on one of the ranks that have published it."""
        owners = [one for one in self.owners if one.dp == dp and one.pool.rows and any(one.last.values())]
        if not owners:
            return
        owner = rng.choice(owners)
        (component, _), rows = rng.choice(list(owner.pool.rows.items()))
        shape = owner.pool.layout.component(component)
        ids = owner.last[shape.page_group]
        starts = rng.choice(shape.fields).starts(shape.page_size)
        rows[rng.choice(ids) + GUARD_PAGES, int(rng.choice(starts.reshape(-1).tolist()))] ^= rng.randint(1, 255)

    def _owner(self, rank: Any, num_pages: int) -> Owner:
        topology = self.topology
        layout = topology.prefills[rank.tp]
        pool = Pool(layout, topology.plan.owned[rank], num_pages, topology.gap)
        self._stack.callback(pool.close)
        info = PrefillRank("pre", layout, topology.plan.sizes, rank, topology.plan.kinds, pool.owned, pool.regions)
        arena = self._arena(self._backends[0]) if pool.regions else None
        rest = (self.settings, self._loop, {self._backends[0].name: self._backends[0]}, Events(), arena)
        worker = PrefillWorker(info, *rest)
        self._stack.callback(worker.close)
        parts = {one.name: part_of(one, rank.tp, topology.plan.sizes.tp) for one in layout.components}
        return Owner(worker, pool, parts)

    def _taker(self, rank: DecodeRank, num_pages: int) -> Taker:
        topology = self.topology
        place, layout = topology.taken.place(rank), topology.decodes[rank.tp]
        pool = Pool(layout, place.layers(layout), num_pages, 7 - topology.gap)
        self._stack.callback(pool.close)
        backends = {self._backends[1].name: self._backends[1]}
        what = (f"dec{rank.dp}", layout, pool.regions, self.settings, self._loop, backends, Events())
        worker = DecodeWorker(*what, arena=self._arena(self._backends[1]), place=place)
        self._stack.callback(worker.close)
        return Taker(worker, pool, place, Landed(pool))

    def _arena(self, backend: Backend) -> Arena | None:
        if self.settings.way != "staged":
            return None
        arena = Arena(NUM_SLOTS, SLOT_BYTES, [backend], shared=True)
        self._stack.callback(arena.close)
        return arena

    def _opened(self, open_backend: OpenBackend) -> Backend:
        return self._stack.enter_context(contextlib.closing(open_backend()))


def run(case: Case, open_backend: OpenBackend, **settings: object) -> None:
    """Every request of a case, each by the ranks of a decode dp group; every byte of every decode pool is compared."""
    with contextlib.ExitStack() as stack:
        site = _site(stack, case, open_backend, **settings)
        site.finish([site.begin(f"t{number}", ask, number) for number, ask in enumerate(case.asks)])
        if case.way == "staged" and case.asks[0].seed % 3 == 0:  # from the second request on, owners stage unasked
            again = [replace(one, seed=one.seed + 1) for one in case.asks]
            site.finish([site.begin(f"again{number}", ask, number) for number, ask in enumerate(again)])


def run_damaged(case: Case, open_backend: OpenBackend) -> bool:
    """The first request of a case, of which a byte is damaged after it was published. Whether that was found: it may be
    one that nobody pulls, or has pulled by then."""
    with contextlib.ExitStack() as stack:
        site, ask = _site(stack, case, open_backend), case.asks[0]
        asked = site.begin("t0", ask, damage=lambda rng: site.damage(ask.dp, rng))
        return site.finish_damaged(asked)


def _site(stack: contextlib.ExitStack, case: Case, open_backend: OpenBackend, **settings: object) -> Site:
    sizes = [group.page_size for group in case.topology.prefill.page_groups]
    most = max(-(-ask.num_tokens // min(sizes)) for ask in case.asks)
    if case.digest_kind:
        settings |= {"verify_digests": True, "digest_kind": case.digest_kind}
    site = Site(stack, case.topology, len(case.asks) * most + SPARE_PAGES, open_backend, way=case.way, **settings)
    site.link()
    return site


def _publishing(sender: Sender, pages: Mapping[str, Sequence[int]], rng: random.Random) -> list[Callable[[], None]]:
    """Calls that publish everything: chunk by chunk in any order, some of them layer range by layer range."""
    pieces: list[dict[str, Any]] = []
    for group, ids in pages.items():
        cuts = sorted({0, len(ids), *(rng.randint(0, len(ids)) for _ in range(rng.randint(0, 2)))})
        for first, stop in itertools.pairwise(cuts):
            chunk = {"page_ids": ids[first:stop], "group": group, "start_page": first}
            owned = {
                name: sender._rank.owned.get(name, ()) for name in sender._rank.layout.page_group(group).components
            }
            if rng.random() < 0.3 and any(owned.values()):
                at = {name: rng.randint(0, len(layers)) for name, layers in owned.items()}
                pieces.append(chunk | {"layers": {name: layers[: at[name]] for name, layers in owned.items()}})
                pieces.append(chunk | {"layers": {name: layers[at[name] :] for name, layers in owned.items()}})
            else:
                pieces.append(chunk)
    rng.shuffle(pieces)
    pieces[-1] |= {"last": True, "aux": sender.transfer_id.encode()}
    return [lambda piece=piece: sender.publish(**piece) for piece in pieces]
