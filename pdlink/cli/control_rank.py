"""Owns one prefill rank of `pdlink bench control`, as a process of its own. It measures nothing but when it published.

Started with one JSON argument; afterwards one line each way on its standard streams. It ends when its standard input
does, so that it never outlives the command that started it, however that ends. The clock is CLOCK_MONOTONIC, which the
processes of one host share.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from pdlink.address import parse_address
from pdlink.config import load_settings
from pdlink.layout.components import CacheLayout, latent
from pdlink.layout.layer_plan import LayerPlan
from pdlink.layout.parallel import ParallelSizes, RankCoordinates
from pdlink.prefill.rank import PrefillRank
from pdlink.runtime.node import Node
from pdlink.runtime.verbs import NodeVerbs, PrefillVerbs
from pdlink.sidecar import connect
from pdlink.testing.parent import Parent
from pdlink.testing.pattern import PatternPool

INSTANCE = "prefill"
PAGE_SIZE = 64
BYTES_PER_TOKEN = 64
NUM_PAGES = 8
REGISTER_TIMEOUT_S = 20.0
SETTLE_S = 0.002
"""Pause before a publish, in which the decode side comes to rest in its wait, as it would during a real prefill."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a rank is started with."""

    cp: int
    rank: int
    num_layers: int
    bootstrap: str
    sidecar: str = ""
    """The socket of the sidecar; empty: the link is in the rank's own process."""

    def to_json(self) -> str:
        return json.dumps([self.cp, self.rank, self.num_layers, self.bootstrap, self.sidecar])

    @classmethod
    def from_json(cls, text: str) -> Start:
        cp, rank, num_layers, bootstrap, sidecar = json.loads(text)
        return cls(int(cp), int(rank), int(num_layers), str(bootstrap), str(sidecar))


def make_layout(num_layers: int) -> CacheLayout:
    """Small pages: what is measured is the control path, not the copy."""
    return CacheLayout(num_layers, (latent(PAGE_SIZE, range(num_layers), bytes_per_token=BYTES_PER_TOKEN),))


def open_node(sidecar: str) -> NodeVerbs:
    """The library in this process, or the sidecar at that socket."""
    return connect(sidecar) if sidecar else Node(load_settings())


def source_page(number: int) -> int:
    """The page that request `number` uses on the prefill side; decode uses the next one."""
    return number % NUM_PAGES


def main() -> None:
    parent, start = Parent(), Start.from_json(sys.argv[1])
    layout, sizes = make_layout(start.num_layers), ParallelSizes(cp=start.cp)
    coordinates = RankCoordinates(cp=start.rank)
    plan = LayerPlan.balanced(layout, sizes)
    owned = plan.owned[coordinates]
    pool = PatternPool(layout, owned, NUM_PAGES)
    try:
        with open_node(start.sidecar) as node:
            rank = PrefillRank(INSTANCE, layout, sizes, coordinates, plan.kinds, owned, pool.regions)
            worker = node.prefill(rank, [parse_address(start.bootstrap)])
            worker.wait_registered(REGISTER_TIMEOUT_S)
            parent.say("ready")
            for transfer_id, number in _commands():
                parent.say(_publish(worker, pool, transfer_id, number))
    finally:
        pool.close()


def _commands() -> Iterator[tuple[str, int]]:
    """Requests as the parent announces them: transfer id and number, until it closes the stream."""
    for line in sys.stdin:
        transfer_id, number = json.loads(line)
        yield str(transfer_id), int(number)


def _publish(worker: PrefillVerbs, pool: PatternPool, transfer_id: str, number: int) -> int:
    """Serve one request of one page; returns when it was published, in ns."""
    page = source_page(number)
    pool.fill(transfer_id, {"kv": [page]})
    sender = worker.open(transfer_id)
    time.sleep(SETTLE_S)
    published_ns = time.monotonic_ns()
    sender.publish([page], last=True)
    return published_ns


if __name__ == "__main__":
    main()
