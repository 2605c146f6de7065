"""Owns a world, a whole link without sockets, threads or clocks: its owners, its readers, the network between them, and
its time. What shape it has, and how much goes wrong in it, a random source draws.

Memory is a value per page, so that wrong bytes are seen as such: a page of a request holds (transfer id, position), and
is scribbled over as soon as its engine may reuse it. What a receive reports as DONE is compared cell by cell.
"""

from __future__ import annotations

import itertools
import random

from pdlink.config import Settings
from pdlink.layout.fingerprint import fingerprint
from pdlink.layout.layer_plan import LayerPlan, PlanKind
from pdlink.layout.parallel import ParallelSizes
from pdlink.layout.readers import ReaderSet
from pdlink.transfer.planner import PullPlanner, Source
from tests.decode.rig import make_layout, make_regions
from tests.link.world.network import Network
from tests.link.world.owner import Owner
from tests.link.world.reader import Reader

STEP_S = 0.25


class World:
    def __init__(self, rng: random.Random, settings: Settings) -> None:
        self.rng = rng
        self.settings = settings
        self.now = 1000.0
        self.network = Network(self)
        self.delivered = rng.choice([0.15, 0.3, 0.5])
        """The share of steps that deliver a frame: the less, the more are under way."""
        self.faults = rng.choice([0.0, 0.2, 0.6])
        self.staged = rng.choice([0.0, 0.6, 1.0, 1.0])
        self.num_slots = rng.choice([1, 2])
        self.attempts = itertools.count(1)
        self.lives = itertools.count(1)
        self.layout = make_layout(2)
        self.digest = fingerprint(self.layout).digest
        self.sizes = ParallelSizes(cp=rng.choice([1, 2, 2, 3]))
        kind = rng.choice([PlanKind.SPLIT, PlanKind.SPLIT, PlanKind.REPLICATED])
        plan = LayerPlan.balanced(self.layout, self.sizes, kind)
        self.kinds = plan.kinds
        self.ranks = list(self.sizes.ranks())
        self.owned = [plan.owned[rank] for rank in self.ranks]
        self.regions = [make_regions(self.layout, cells, (number + 2) << 40) for number, cells in enumerate(self.owned)]
        self.num_pages = rng.randint(1, 4)
        self.wanted = rng.choice([self.num_pages, self.num_pages, rng.randint(0, self.num_pages)])
        self.expect_aux = rng.random() < 0.5
        self.ids = ["t", "u"] if rng.random() < 0.5 else ["t"]
        self.owners = [Owner(self, number) for number in range(len(self.ranks))]
        self.by_id = {one.worker_id: one for one in self.owners}
        whole = {one.name: one.layers for one in self.layout.components}
        sources = [Source(one.worker_id, tuple(self.regions[one.number])) for one in self.owners]
        self.planner = PullPlanner(self.layout, sources, make_regions(self.layout, whole, 1 << 40))
        aux = [one for one in self.owners if one.worker._facts.is_aux_owner]
        self.aux_owner = aux[-1].worker_id if aux else self.owners[0].worker_id
        num_readers = rng.choice([1, 1, 2])
        self.readers = [Reader(self, ReaderSet("dec", index, num_readers)) for index in range(num_readers)]
        if rng.random() < 0.2:
            self.readers.append(Reader(self, ReaderSet("other")))

    def close(self) -> None:
        for one in self.owners:
            one.worker.close()

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + STEP_S)
            for owner in self.owners:
                owner.loop.run_due()
            for reader in self.readers:
                reader.tick()
