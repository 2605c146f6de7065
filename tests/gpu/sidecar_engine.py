"""An engine with a large pool on a GPU, attached to a sidecar, as a process that can be killed. One JSON line says what
it takes; it then does one request of its own and waits for the end of its input.
"""

from __future__ import annotations

import json
import sys

from pdlink.address import Address
from pdlink.layout.components import CacheLayout, latent
from pdlink.layout.layer_plan import LayerPlan
from pdlink.layout.parallel import ParallelSizes, RankCoordinates
from pdlink.layout.regions import MemoryKind, Region
from pdlink.prefill.rank import PrefillRank
from pdlink.sidecar import connect
from pdlink.testing.parent import Parent
from tests.gpu.sidecar_site import take
from tests.processes import PATIENCE_S

PAGE_SIZE, TOKEN_BYTES = 64, 1152


def main() -> None:
    parent, told = Parent(), json.loads(sys.stdin.readline())
    layout, sizes, rank = (
        CacheLayout(1, (latent(PAGE_SIZE, range(1), bytes_per_token=TOKEN_BYTES),)),
        ParallelSizes(),
        RankCoordinates(),
    )
    plan = LayerPlan.balanced(layout, sizes)
    make = take(told["form"], 0)
    assert make is not None
    block = make(told["nbytes"])
    page_bytes = PAGE_SIZE * TOKEN_BYTES
    region = Region("latent", 0, block.address, page_bytes, page_bytes, block.nbytes // page_bytes, MemoryKind.CUDA, 0)
    with connect(told["socket"]) as node:
        whole = PrefillRank(told["instance"], layout, sizes, rank, plan.kinds, plan.owned[rank], (region,))
        worker = node.prefill(whole, [Address("127.0.0.1", told["port"])])
        worker.wait_registered(PATIENCE_S)
        sender = worker.open("never read")
        sender.publish([0, 1])
        parent.say({"pid": node.pid})
        sys.stdin.read()
    block.close()


if __name__ == "__main__":
    main()
