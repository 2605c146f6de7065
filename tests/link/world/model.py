"""Owns a world, a whole link without sockets, threads or clocks: its owners, its readers, the network between them, and
its time. What shape it has, and how much goes wrong in it, a random source draws.

Memory is a value per page, so that wrong bytes are seen as such: a page of a request holds (transfer id, position), and
is scribbled over as soon as its engine may reuse it. What a receive reports as DONE is compared cell by cell.
"""

from __future__ import annotations

import itertools
import random

from pdlink.config import Settings
from pdlink.layout.components import CacheLayout, heads
from pdlink.layout.decode_plan import DecodePlace, DecodeRank, DecodeSizes
from pdlink.layout.election import elect_aux_owner
from pdlink.layout.fingerprint import fingerprint
from pdlink.layout.layer_plan import LayerPlan, PlanKind
from pdlink.layout.parallel import ParallelSizes
from pdlink.layout.readers import ReaderSet
from pdlink.transfer.planner import PullPlanner, Source
from tests.decode.rig import PAGE_SIZE, make_layout, make_regions
from tests.link.world.network import Network
from tests.link.world.owner import Owner
from tests.link.world.reader import Reader

STEP_S = 0.25
HEADS = 4


def by_heads(num_heads: int) -> CacheLayout:
    made = (
        heads(name, PAGE_SIZE, range(2), num_heads=num_heads, head_bytes=64, dtype="x", total_heads=HEADS)
        for name in "kv"
    )
    return CacheLayout(2, tuple(made))


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
        self.shape = rng.choice(["whole", "whole", "heads", "tokens"])
        """What decode ranks take of pages: all, some heads, or some tokens."""
        prefill_tp = rng.choice([1, 2]) if self.shape == "heads" else 1
        self.layout = by_heads(HEADS // prefill_tp) if self.shape == "heads" else make_layout(2)
        self.digest = fingerprint(self.layout).digest
        self.sizes = ParallelSizes(cp=rng.choice([1, 2, 2, 3]), tp=prefill_tp)
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
        self.aux_owner = self.owners[self.ranks.index(elect_aux_owner(self.layout, plan, 0))].worker_id
        num_readers = 2 if self.shape == "tokens" else rng.choice([1, 1, 2])
        self.turns = num_readers if self.shape == "tokens" else 1
        self.readers = [Reader(self, ReaderSet("dec", index, num_readers)) for index in range(num_readers)]
        if rng.random() < 0.2:
            self.readers.append(Reader(self, ReaderSet("other")))

    def planner(self, readers: ReaderSet) -> PullPlanner:
        """Of a reader that is a tensor-parallel rank of its set, which splits heads, or tokens."""
        sizes = DecodeSizes(tp=readers.num_readers, dcp=self.turns if readers.num_readers > 1 else 1)
        layout = by_heads(HEADS // sizes.tp) if self.shape == "heads" else self.layout
        place = DecodePlace(sizes, DecodeRank(tp=readers.reader_index))
        sources = [
            Source(one.worker_id, tuple(self.regions[one.number]), one.worker._facts.parts) for one in self.owners
        ]
        every = {one.name: one.layers for one in layout.components}
        target = make_regions(layout, every, 1 << 40)
        parts = place.parts(layout)
        return PullPlanner(layout, sources, target, source_layout=self.layout, parts=parts, turn=place.index)

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
