"""Owns the prefill side of `pdlink bench transfer`, as a process of its own: a rank, and the bootstrap service that
tells of it. It measures nothing.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from pdlink.address import Address, parse_address
from pdlink.bootstrap.server import BootstrapServer
from pdlink.cli.transfer_bytes import Shape
from pdlink.cli.transfer_memory import Pool, make_layout, open_pool
from pdlink.cli.transfer_talk import converse
from pdlink.config import load_settings
from pdlink.layout.layer_plan import LayerPlan
from pdlink.layout.parallel import ParallelSizes, RankCoordinates
from pdlink.prefill.rank import PrefillRank
from pdlink.runtime.node import Node

INSTANCE = "prefill"
REGISTER_TIMEOUT_S = 20.0


def request_names(number: int, reader: int = 0) -> tuple[tuple[bool, str], ...]:
    """The transfers of one round to one reader: the one that warms up (True), and the one that is measured."""
    return (True, f"warm-{number}-{reader}"), (False, f"request-{number}-{reader}")


class Owner:
    """The rank of one case at a time."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._pool: Pool | None = None

    def open(
        self,
        shape: list[Any],
        settings: dict[str, Any],
        device: int,
        rank: int = 0,
        num_ranks: int = 1,
        bootstrap: str = "",
    ) -> dict[str, Any]:
        """Start rank `rank` of an instance that splits its layers over `num_ranks`; the shape's layers are its own.

        It registers at `bootstrap`, or starts that (empty). Returns where bootstrap service and memory are.
        """
        with ExitStack() as starting:
            self._shape = Shape(*shape)
            pool = self._pool = open_pool(self._shape, device)
            starting.callback(pool.close)
            address = parse_address(bootstrap) if bootstrap else self._start_bootstrap(starting)
            node = starting.enter_context(Node(load_settings(**settings)))
            layout, sizes, place = make_layout(self._shape), ParallelSizes(cp=num_ranks), RankCoordinates(cp=rank)
            plan = LayerPlan.balanced(layout, sizes)
            owned = plan.owned[place]
            mine = tuple(region for region in pool.regions if region.layer in owned[region.component])
            facts = PrefillRank(INSTANCE, layout, sizes, place, plan.kinds, owned, mine)
            self._worker = node.prefill(facts, [address])
            self._worker.wait_registered(REGISTER_TIMEOUT_S)
            self._stack = starting.pop_all()
        return {"bootstrap": str(address), "path": pool.path}

    def _start_bootstrap(self, stack: ExitStack) -> Address:
        return stack.enter_context(BootstrapServer.start(Address("127.0.0.1", 0))).address

    def fill(self, number: int, damage: bool) -> dict[str, Any]:
        """Write fill `number`, for whoever reads this memory."""
        assert self._pool is not None
        self._pool.block.fill(number)
        if damage:
            self._pool.block.damage()
        return {}

    def publish(self, number: int, damage: bool, num_readers: int = 1) -> dict[str, Any]:
        """Write fill `number` and publish it twice for each reader: as the request that warms up, and as the one
        that is measured. Returns how long the last publish took."""
        self.fill(number, damage)
        for warm, name in (one for reader in range(num_readers) for one in request_names(number, reader)):
            sender, pages = self._worker.open(name), self._shape.pages(warm)[0].tolist()
            began = time.perf_counter()
            sender.publish(pages, last=True)
            publish_s = time.perf_counter() - began
        return {"publish_s": publish_s}

    def close(self) -> dict[str, Any]:
        self._stack.close()
        self._pool = None
        return {}


if __name__ == "__main__":
    converse(Owner())
