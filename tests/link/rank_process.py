"""One prefill rank as a process: commands come in and answers go out as JSON lines.

Started by `ranks`; its first line of input says who it is.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pdlink.address import Address
from pdlink.config import load_settings
from pdlink.layout.layer_plan import LayerPlan
from pdlink.layout.parallel import ParallelSizes, RankCoordinates
from pdlink.prefill.rank import PrefillRank
from pdlink.prefill.sender import Sender
from pdlink.prefill.worker import PrefillWorker
from pdlink.runtime.node import Node
from pdlink.testing.parent import Parent
from pdlink.testing.pattern import PatternPool
from tests.link.rig import DEADLINE_S, make_layout


def main() -> None:
    parent, who = Parent(), json.loads(sys.stdin.readline())
    layout, sizes, rank = make_layout(who["num_layers"]), ParallelSizes(cp=who["cp"]), RankCoordinates(cp=who["rank"])
    plan = LayerPlan.balanced(layout, sizes)
    pool = PatternPool(layout, plan.owned[rank], who["num_pages"])
    with Node(load_settings({}, **who["settings"])) as node:
        info = PrefillRank("pre", layout, sizes, rank, plan.kinds, plan.owned[rank], pool.regions)
        worker = node.prefill(info, [Address("127.0.0.1", who["port"])])
        worker.wait_registered(DEADLINE_S)
        senders: dict[str, Sender] = {}
        parent.say({"ready": True})
        for line in sys.stdin:
            told = json.loads(line)
            obey(told, worker, pool, senders)
            parent.say({"state": senders[told["id"]].poll().value})
    pool.close()


def obey(told: dict[str, Any], worker: PrefillWorker, pool: PatternPool, senders: dict[str, Sender]) -> None:
    name = told["id"]
    match told["do"]:
        case "open":
            pool.fill(name, {"kv": told["pages"]})
            senders[name] = worker.open(name)
        case "publish":
            senders[name].publish(told["pages"], last=told["last"])
        case "withdraw":
            senders[name].withdraw(told["pages"])
        case "abort":
            senders[name].abort()
        case "overwrite":  # as the next user of the pages does
            pool.fill(told["by"], {"kv": told["pages"]})
        case "poll":
            pass


if __name__ == "__main__":
    main()
