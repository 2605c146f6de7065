"""One prefill rank as a process: commands come in and answers go out as JSON lines.

Run by `test_processes`; its first line of input says who it is.
"""

from __future__ import annotations

import json
import sys

from pdlink.address import Address
from pdlink.config import load_settings
from pdlink.layout.layer_plan import LayerPlan
from pdlink.layout.parallel import ParallelSizes, RankCoordinates
from pdlink.prefill.worker import PrefillRank
from pdlink.runtime.node import Node
from pdlink.testing.pattern import PatternPool
from tests.link.rig import DEADLINE_S, make_layout


def main() -> None:
    who = json.loads(sys.stdin.readline())
    layout, sizes, rank = make_layout(who["num_layers"]), ParallelSizes(cp=who["cp"]), RankCoordinates(cp=who["rank"])
    plan = LayerPlan.balanced(layout, sizes)
    pool = PatternPool(layout, plan.owned[rank], 16)
    with Node(load_settings({}, **who["settings"])) as node:
        info = PrefillRank("pre", layout, sizes, rank, plan.kinds, plan.owned[rank], pool.regions)
        worker = node.prefill(info, [Address("127.0.0.1", who["port"])])
        worker.wait_registered(DEADLINE_S)
        senders = {}
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            told = json.loads(line)
            name = told["id"]
            if told["do"] == "open":
                pool.fill(name, {"kv": told["pages"]})
                senders[name] = worker.open(name)
            elif told["do"] == "publish":
                senders[name].publish(told["pages"], last=told["last"])
            print(json.dumps({"state": senders[name].poll().value}), flush=True)
    pool.close()


if __name__ == "__main__":
    main()
