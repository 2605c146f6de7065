"""Owns one decode rank as a process: it receives what it is told to, and says how requests end and what came.

Lines go both ways (see `cluster`). The pages of a request that failed are looked at again at the next settlement,
before anybody else gets them; those of one that succeeded too, where that is asked for.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from dataclasses import dataclass
from typing import Any

from pdlink.address import parse_address
from pdlink.bootstrap.client import BootstrapClient
from pdlink.config import load_settings
from pdlink.decode.links import PrefillInstance
from pdlink.decode.receiver import Receiver
from pdlink.decode.worker import DecodeWorker
from pdlink.errors import DuplicateTransfer, PdlinkError
from pdlink.layout.fingerprint import fingerprint
from pdlink.layout.readers import ReaderSet
from pdlink.runtime.node import Node
from pdlink.testing.parent import Parent
from pdlink.testing.pattern import SENTINEL, PatternPool
from pdlink.transfer.states import ReceiverState
from tests.faults import census, lines
from tests.faults.leaks import Leaks
from tests.faults.rank_process import EXIT_CODE
from tests.faults.shape import PAGE_SIZE, make_layout
from tests.faults.table import hash_page

KNOWN_TIMEOUT_S = 2.0


@dataclass
class Request:
    receiver: Receiver
    pages: list[int]
    num_ends: int = 0
    """How often pdlink has said that it ended."""

    def count_end(self, receiver: Receiver) -> None:
        self.num_ends += 1


class Reader:
    """The engine of one decode rank."""

    def __init__(
        self, parent: Parent, node: Node, worker: DecodeWorker, pool: PatternPool, instance: PrefillInstance
    ) -> None:
        self.parent, self.node, self.worker, self.pool, self.instance = parent, node, worker, pool, instance
        self.layout = make_layout()
        self.free = deque(range(pool.num_pages))
        self.backlog: deque[dict[str, Any]] = deque()
        self.live: dict[str, Request] = {}
        self.aside: dict[str, Request] = {}
        self.keep: set[str] = set()
        self.leaks = Leaks(next(iter(node.backends.values())), pool.regions[0])

    def do(self, told: dict[str, Any]) -> None:
        match told["do"]:
            case "receive":
                self.backlog.append(told)
            case "abort":
                if told["id"] in self.live:
                    self.live[told["id"]].receiver.abort()
            case "keep":
                self.keep = set(self.live)
                seen = {
                    name: {"state": one.receiver.poll().value, "hashes": self._hashes(one.pages)}
                    for name, one in self.live.items()
                }
                self.parent.say({"re": told["n"], "live": seen})
            case "settle":
                self.parent.say({"re": told["n"], **self._settle()})
            case "census":
                free = len(self.free)
                counts = census.take(self.node) | {"free_pages": free, "live": len(self.live) + len(self.backlog)}
                self.parent.say({"re": told["n"], "census": counts})
            case "known":
                self.parent.say({"re": told["n"], "known": self._known()})
            case "follows":
                self.parent.say({"re": told["n"], "follows": self._follows()})
            case "leak":
                self.leaks.add(told["what"])
                self.parent.say({"re": told["n"]})
            case "exit":
                sys.exit(EXIT_CODE)

    def work(self) -> None:
        while self.backlog and self.backlog[0]["pages"] <= len(self.free):
            self._receive(self.backlog.popleft())
        for name in [name for name, one in self.live.items() if one.receiver.state.is_final and one.num_ends]:
            self._end(name)

    def _receive(self, told: dict[str, Any]) -> None:
        pages = [self.free.popleft() for _ in range(told["pages"])]
        held, index, number = told.get("held", 0) * PAGE_SIZE, *told.get("reader", (0, 1))
        readers = ReaderSet("dec" if number > 1 else self.worker.instance, index, number)
        tokens = held + len(pages) * PAGE_SIZE
        wanted = {"prefix_tokens": held, "readers": readers, "expect_aux": bool(pages)}
        try:
            receiver = self.worker.receive(told["id"], self.instance, {"kv": pages}, tokens, **wanted)
        except DuplicateTransfer as error:
            self.free.extend(pages)
            self.parent.say({"refused": told["id"], "why": str(error)})
            return
        one = self.live[told["id"]] = Request(receiver, pages)
        receiver.on_end(one.count_end)

    def _end(self, name: str) -> None:
        one = self.live.pop(name)
        state, failure = one.receiver.poll(), one.receiver.failure
        aux = one.receiver.result().aux if state is ReceiverState.DONE else None
        said = {"ended": name, "state": state.value, "ends": one.num_ends, "hashes": self._hashes(one.pages)}
        said |= {"reason": failure.reason.value, "why": str(failure)} if failure else {}
        self.parent.say(said | {"aux": aux.decode("latin-1") if aux is not None else None})
        if state is ReceiverState.DONE and name not in self.keep:
            self._hand_back(one)
        else:
            self.aside[name] = one

    def _settle(self) -> dict[str, Any]:
        """How the requests since the last time look now; then their pages are free."""
        later = {
            name: {"state": one.receiver.poll().value, "ends": one.num_ends, "hashes": self._hashes(one.pages)}
            for name, one in self.aside.items()
        }
        used = [page for one in (*self.aside.values(), *self.live.values()) for page in one.pages]
        touched = self.pool.find_touched({"kv": used})
        for one in self.aside.values():
            self._hand_back(one)
        self.aside.clear()
        self.keep.clear()
        return {"later": later, "touched": str(touched) if touched else ""}

    def _known(self) -> dict[str, dict[str, int]]:
        """Bootstrap -> rank -> the incarnation that it knows of it; none of a bootstrap that has no whole instance."""
        found = {}
        for address in self.instance.bootstraps:
            with BootstrapClient([address], self.node.settings) as client:
                try:
                    info = client.resolve(self.instance.name, fingerprint(self.layout), KNOWN_TIMEOUT_S)
                    found[str(address)] = {one.worker_id: one.incarnation for one in info.ranks}
                except PdlinkError:
                    found[str(address)] = {}
        return found

    def _follows(self) -> bool:
        """Whether a bootstrap tells this rank of changes, and has told it something."""
        watch = self.worker._links._watched.get(self.instance)
        return watch is not None and watch._told is not None

    def _hand_back(self, one: Request) -> None:
        for region in self.pool.regions:
            self.pool.view(region.component, region.layer)[one.pages] = SENTINEL
        self.free.extend(one.pages)

    def _hashes(self, pages: list[int]) -> dict[str, list[str]]:
        """ "component/layer" -> the hash of each page of a request, in the order of its positions."""
        found = {}
        for region in self.pool.regions:
            view = self.pool.view(region.component, region.layer)
            found[f"{region.component}/{region.layer}"] = [hash_page(view[page].tobytes()) for page in pages]
        return found


def main() -> None:
    parent, who = Parent(), json.loads(sys.stdin.readline())
    layout = make_layout()
    pool = PatternPool(layout, {one.name: one.layers for one in layout.components}, who["num_pages"])
    node = Node(load_settings({}, **who["settings"]))
    worker = node.decode(who["name"], layout, pool.regions)
    instance = PrefillInstance("pre", tuple(parse_address(one) for one in who["bootstraps"]))
    parent.say({"ready": os.getpid()})
    engine = Reader(parent, node, worker, pool, instance)
    lines.obey(engine.do, engine.work)
    node.close()
    pool.close()


if __name__ == "__main__":
    main()
