"""One decode rank as a process that asks for a request by the staged way and never ends its first pull, to be killed.

Run by `test_processes`; its first line of input says where the bootstrap service is.
"""

from __future__ import annotations

import json
import sys

from pdlink.address import Address
from pdlink.config import load_settings
from pdlink.decode.links import PrefillInstance
from pdlink.runtime.node import Node
from pdlink.testing.parent import Parent
from pdlink.testing.pattern import PatternPool
from tests.link.rig import PAGE_SIZE, Gate, make_layout


def main() -> None:
    parent, told = Parent(), json.loads(sys.stdin.readline())
    layout = make_layout(told["num_layers"])
    pool = PatternPool(layout, {one.name: one.layers for one in layout.components}, 16)
    node = Node(load_settings({}, backends="ipc", way="staged"))
    gate = node.backends["ipc"] = Gate(node.backends["ipc"])
    worker = node.decode("dec", layout, pool.regions)
    instance = PrefillInstance("pre", (Address("127.0.0.1", told["port"]),))
    worker.receive(told["id"], instance, {"kv": [1, 2, 3]}, 3 * PAGE_SIZE)
    gate.wait_held_of(told["num_owners"])
    parent.say({"held": True})
    sys.stdin.read()


if __name__ == "__main__":
    main()
