"""Owns one real transfer on this machine over one transport, in a process that `pdlink doctor` starts: a transport that
crashes must not take the doctor with it. Prints one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time

from pdlink.address import Address
from pdlink.bootstrap.server import BootstrapServer
from pdlink.config import load_settings
from pdlink.decode.links import PrefillInstance
from pdlink.errors import PdlinkError
from pdlink.layout import CacheLayout, LayerPlan, ParallelSizes
from pdlink.layout.components import latent
from pdlink.memory.sharded_pool import LayerShardedPool
from pdlink.prefill.rank import PrefillRank
from pdlink.runtime.node import Node

NUM_PAGES = 16
PAGE_SIZE = 64
TIMEOUT_S = 30.0
LOOPBACK = Address("127.0.0.1", 0)


def transfer(backend: str) -> dict[str, object]:
    """Publish pages of a prefill rank, pull them into a decode rank, and compare them. Raises `PdlinkError`."""
    # Nothing of this machine's settings but the transport's own: this is about the transport.
    settings = load_settings({}, backends=backend, mooncake_protocol="tcp", transfer_timeout_s=TIMEOUT_S)
    layout = CacheLayout(2, (latent(PAGE_SIZE, range(2), bytes_per_token=576),))
    sizes = ParallelSizes()
    plan = LayerPlan.balanced(layout, sizes)
    (rank,) = sizes.ranks()
    with contextlib.ExitStack() as stack:
        bootstrap = stack.enter_context(BootstrapServer.start(LOOPBACK, settings))
        pools = [LayerShardedPool(layout, plan.owned[rank], NUM_PAGES) for _ in range(2)]
        for pool in pools:
            stack.callback(pool.close)
        source, target = pools
        for layer in range(2):
            source.region_tensor("latent", layer).fill_(layer + 1)
        nodes = [stack.enter_context(Node(settings)) for _ in range(2)]
        facts = PrefillRank("doctor", layout, sizes, rank, plan.kinds, plan.owned[rank], source.regions())
        worker = nodes[0].prefill(facts, [bootstrap.address])
        worker.wait_registered(TIMEOUT_S)
        decode = nodes[1].decode("doctor", layout, target.regions())
        pages = list(range(NUM_PAGES))
        began = time.perf_counter()
        receiver = decode.receive("loopback", PrefillInstance("doctor", (bootstrap.address,)), {"kv": pages}, 1024)
        worker.open("loopback").publish(pages, last=True)
        result = receiver.wait(TIMEOUT_S)
        took_s = time.perf_counter() - began
        wrong = [layer for layer in range(2) if not bool((target.region_tensor("latent", layer) == layer + 1).all())]
        return {"ok": not wrong, "wrong_layers": wrong, "num_bytes": sum(result.num_bytes.values()), "took_s": took_s}


def main() -> None:
    try:
        said = transfer(sys.argv[1])
    except PdlinkError as error:
        said = {"ok": False, "error": str(error)}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
