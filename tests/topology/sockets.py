"""Owns both instances of a topology over real sockets and a real bootstrap, and whole requests between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from pdlink.decode.worker import DecodeWorker
from pdlink.layout import CacheLayout, OwnedLayers, part_of
from pdlink.prefill.rank import PrefillRank
from pdlink.prefill.worker import PrefillWorker
from pdlink.runtime.node import Node
from pdlink.transfer.states import SenderState
from tests.link.rig import DEADLINE_S, Site, assert_all
from tests.topology.cache import Landed, Pool, Truth
from tests.topology.strategies import Topology

MakePool = Callable[[CacheLayout, OwnedLayers, bool], Pool]
"""(layout, owned, whether it is of decode)."""


class Pair:
    """One prefill and one decode instance (`dp` 1 each), with pools that `make_pool` makes and the stack closes."""

    def __init__(self, stack: contextlib.ExitStack, site: Site, topology: Topology, make_pool: MakePool) -> None:
        self.topology = topology
        self.instance = site.instance
        self.owners: list[tuple[PrefillWorker, Pool]] = []
        self.readers: list[tuple[DecodeWorker, Landed]] = []
        self.nodes: list[Node] = []
        plan, taken = topology.plan, topology.taken
        for rank in plan.sizes.ranks():
            layout, owned = topology.prefills[rank.tp], plan.owned[rank]
            pool = make_pool(layout, owned, False)
            stack.callback(pool.close)
            self.nodes.append(site.node())
            info = PrefillRank("pre", layout, plan.sizes, rank, plan.kinds, owned, pool.regions)
            self.owners.append((self.nodes[-1].prefill(info, [site.bootstrap.address]), pool))
        for worker, _ in self.owners:
            worker.wait_registered(DEADLINE_S)
        for reader in taken.sizes.ranks():
            place, layout = taken.place(reader), topology.decodes[reader.tp]
            target = make_pool(layout, place.layers(layout), True)
            stack.callback(target.close)
            self.nodes.append(site.node())
            self.readers.append((self.nodes[-1].decode("dec", layout, target.regions, place=place), Landed(target)))

    def move(self, name: str, source: Sequence[int], target: Sequence[int]) -> set[str]:
        """A request of as many pages as `source` has, all of which comes out, and nothing else. Returns the ways."""
        (group,) = self.topology.prefill.page_groups
        truth = Truth(name, {group.name: len(source)})
        pages = {group.name: list(target)}
        receivers = []
        for worker, landed in self.readers:
            receivers.append(worker.receive(name, self.instance, pages, group.page_size * len(source)))
            parts = worker._facts.parts
            landed.add(truth, parts, pages, {group.name: 0}, dict.fromkeys(parts, False))
        senders = []
        for prefill, pool in self.owners:
            tp = (prefill.rank.rank.tp, self.topology.plan.sizes.tp)
            truth.fill(pool, {one.name: part_of(one, *tp) for one in pool.layout.components}, {group.name: source})
            pool.upload()
            senders.append(prefill.open(name))
            senders[-1].publish(source, last=True)
        results = [one.wait(DEADLINE_S) for one in receivers]
        assert_all(senders, SenderState.RELEASED)
        for _, landed in self.readers:
            landed.pool.download()
        assert [landed.find_wrong() for _, landed in self.readers] == [""] * len(self.readers)
        return {str(way) for result in results for ways in result.ways.values() for way in ways}
