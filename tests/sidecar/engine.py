"""An engine whose link is in a sidecar, as a process that can be killed: commands come in and answers go out as JSON.

The first line of input says who it is. It forks at once, and what it has forked keeps its sockets open: an engine's
death must be seen all the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from pdlink.address import Address
from pdlink.decode.links import PrefillInstance
from pdlink.decode.receiver import Receiver
from pdlink.errors import PdlinkError
from pdlink.runtime.verbs import SenderVerbs
from pdlink.sidecar import SidecarNode, connect
from pdlink.testing.parent import Parent
from pdlink.testing.pattern import PatternPool
from tests.processes import PATIENCE_S
from tests.sidecar.rig import INSTANCE, PAGE_SIZE, make_layout, make_pool, prefill_rank


def main() -> None:
    parent, who = Parent(), json.loads(sys.stdin.readline())
    pool = make_pool()
    with contextlib.closing(pool), connect(who["socket"]) as node:
        if who["fork"] and os.fork() == 0:
            keep_open(Path(who["fork"]))
        address = Address("127.0.0.1", who["port"])
        engine = PrefillEngine(node, pool, address) if who["role"] == "prefill" else DecodeEngine(node, pool, address)
        parent.say({"ready": True, "pid": node.pid})
        for line in sys.stdin:
            told = json.loads(line)
            answer: dict[str, Any] = {}
            try:
                answer = engine.obey(told) if told["do"] != "health" else {}
            except PdlinkError as error:
                answer = {"error": str(error)}
            parent.say({**answer, "pid": node.pid, "ok": node.health().ok})


def keep_open(until: Path) -> None:
    """In the fork, which has no thread but this one."""
    give_up = time.monotonic() + PATIENCE_S
    while not until.exists() and time.monotonic() < give_up:
        time.sleep(0.05)
    os._exit(0)


class PrefillEngine:
    def __init__(self, node: SidecarNode, pool: PatternPool, bootstrap: Address) -> None:
        self.pool = pool
        self.worker = node.prefill(prefill_rank(pool), [bootstrap])
        self.worker.wait_registered(PATIENCE_S)
        self.senders: dict[str, SenderVerbs] = {}

    def obey(self, told: dict[str, Any]) -> dict[str, Any]:
        name = told["id"]
        match told["do"]:
            case "open":
                self.pool.fill(name, {"kv": told["pages"]})
                self.senders[name] = self.worker.open(name)
            case "publish" if name in self.senders:
                self.senders[name].publish(told["pages"], last=told["last"])
            case "abort" if name in self.senders:
                self.senders[name].abort()
        sender = self.senders.get(name)
        return {"state": sender.poll().value, "failure": str(sender.failure or "")} if sender else {"state": "refused"}


class DecodeEngine:
    def __init__(self, node: SidecarNode, pool: PatternPool, bootstrap: Address) -> None:
        self.pool = pool
        self.worker = node.decode("dec", make_layout(), pool.regions)
        self.prefill = PrefillInstance(INSTANCE, (bootstrap,))
        self.receivers: dict[str, Receiver] = {}

    def obey(self, told: dict[str, Any]) -> dict[str, Any]:
        name = told["id"]
        if told["do"] == "receive":
            self.pool.wipe()
            pages = {"kv": told["pages"]}
            self.receivers[name] = self.worker.receive(name, self.prefill, pages, len(told["pages"]) * PAGE_SIZE)
        if told["do"] == "check":
            pages = {"kv": told["pages"]}
            wrong = self.pool.find_wrong(name, pages) or self.pool.find_touched(pages)
            return {"wrong": str(wrong or "")}
        receiver = self.receivers.get(name)
        if told["do"] == "abort" and receiver:
            receiver.abort()
        if receiver is None:
            return {"state": "failed", "failure": "it was refused"}
        return {"state": receiver.poll().value, "failure": str(receiver.failure or "")}


if __name__ == "__main__":
    main()
