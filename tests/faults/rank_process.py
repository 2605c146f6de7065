"""Owns one prefill rank as a process: it publishes what it is told to, page by page, and says how requests end.

Lines go both ways (see `cluster`). Pages that it has back are overwritten at once, as the next user of them does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from pdlink.address import Address, parse_address
from pdlink.config import load_settings
from pdlink.layout.layer_plan import LayerPlan
from pdlink.layout.parallel import ParallelSizes, RankCoordinates
from pdlink.prefill.rank import PrefillRank
from pdlink.prefill.sender import Sender
from pdlink.prefill.worker import PrefillWorker
from pdlink.runtime.node import Node
from pdlink.testing.parent import Parent
from pdlink.testing.pattern import PatternPool
from tests.faults import census, lines
from tests.faults.leaks import Leaks
from tests.faults.shape import make_layout, through_middleman

EXIT_CODE = 3
FREED = 0xDD


@dataclass
class Request:
    """What is to be published of one request: `left` pages, the next of them at `due`."""

    sender: Sender
    pages: list[int]
    num_chunks: int
    gap_s: float
    due: float = 0.0
    num_said: int = 0


class Rank:
    """The engine of one prefill rank."""

    def __init__(self, parent: Parent, node: Node, worker: PrefillWorker, pool: PatternPool) -> None:
        self.parent, self.node, self.worker, self.pool = parent, node, worker, pool
        self.free = deque(range(pool.num_pages))
        self.backlog: deque[dict[str, Any]] = deque()
        self.live: dict[str, Request] = {}
        self.ended: list[Request] = []
        """Since the last settlement: what they say must not change any more."""
        self.leaks = Leaks(next(iter(node.backends.values())), pool.regions[0])

    def do(self, told: dict[str, Any]) -> None:
        match told["do"]:
            case "serve":
                self.backlog.append(told)
            case "abort":
                if told["id"] in self.live:
                    self.live[told["id"]].sender.abort()
            case "census":
                counts = census.take(self.node) | {"free_pages": len(self.free), "live": len(self.live)}
                self.parent.say({"re": told["n"], "census": counts})
            case "settle":
                states = {one.sender.transfer_id: one.sender.poll().value for one in self.ended}
                self.ended.clear()
                self.parent.say({"re": told["n"], "states": states})
            case "leak":
                self.leaks.add(told["what"])
                self.parent.say({"re": told["n"]})
            case "exit":
                sys.exit(EXIT_CODE)

    def work(self) -> None:
        while self.backlog and self.backlog[0]["pages"] <= len(self.free):
            self._open(self.backlog.popleft())
        for name, one in list(self.live.items()):
            if one.sender.poll().is_final:
                self._take_back(name)
            elif one.num_said < one.num_chunks and time.monotonic() >= one.due:
                self._publish(one)

    def _open(self, told: dict[str, Any]) -> None:
        pages = [self.free.popleft() for _ in range(told["pages"])]
        self.pool.fill(told["id"], {"kv": pages})
        self.live[told["id"]] = Request(self.worker.open(told["id"]), pages, told["chunks"], told["gap_s"])

    def _publish(self, one: Request) -> None:
        size = -(-len(one.pages) // one.num_chunks)
        first = one.num_said * size
        one.num_said += 1
        last = one.num_said == one.num_chunks
        aux = one.sender.transfer_id.encode() if last else None
        one.sender.publish(one.pages[first : first + size], last=last, aux=aux)
        one.due = time.monotonic() + one.gap_s

    def _take_back(self, name: str) -> None:
        one = self.live.pop(name)
        for region in self.pool.regions:
            self.pool.view(region.component, region.layer)[one.pages] = FREED
        self.free.extend(one.pages)
        self.ended.append(one)
        why = str(one.sender.failure) if one.sender.failure else ""
        self.parent.say({"ended": name, "state": one.sender.poll().value, "why": why})


def main() -> None:
    parent, who = Parent(), json.loads(sys.stdin.readline())
    layout, sizes, rank = make_layout(), ParallelSizes(cp=who["cp"]), RankCoordinates(cp=who["rank"])
    plan = LayerPlan.balanced(layout, sizes)
    pool = PatternPool(layout, plan.owned[rank], who["num_pages"])
    node = Node(load_settings({}, **who["settings"]))
    listen_at(node, who["port"])
    worker = node.prefill(PrefillRank("pre", layout, sizes, rank, plan.kinds, plan.owned[rank], pool.regions))
    if who["middleman"]:
        through_middleman(worker, parse_address(who["middleman"]))
    worker.register([parse_address(one) for one in who["bootstraps"]])
    worker.wait_registered(who["patience_s"])
    own = worker.registration().rank
    parent.say({"ready": os.getpid(), "worker_id": own.worker_id, "incarnation": own.incarnation})
    engine = Rank(parent, node, worker, pool)
    lines.obey(engine.do, engine.work)
    node.close()
    pool.close()


def listen_at(node: Node, port: int) -> None:
    """Have the node's control socket at `port`, so that a successor is met at the address of the one before it."""
    bind = node.loop.bind
    node.loop.bind = lambda address, *rest: bind(Address(address.host, port), *rest)  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
