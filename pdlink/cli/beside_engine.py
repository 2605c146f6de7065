"""Owns the engine of `pdlink bench sidecar`, as a process of its own: steps of matrix products, timed one by one, and
the publishing of requests between them, as a scheduler does it.

The link is in this process or in a sidecar. Started with one line of JSON; one line each way afterwards. It ends when
its standard input does.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from pdlink.address import parse_address
from pdlink.cli.control_rank import open_node
from pdlink.layout.components import CacheLayout, latent
from pdlink.layout.layer_plan import LayerPlan
from pdlink.layout.parallel import ParallelSizes, RankCoordinates
from pdlink.prefill.rank import PrefillRank
from pdlink.runtime.verbs import PrefillVerbs, SenderVerbs
from pdlink.testing.parent import Parent
from pdlink.testing.pattern import PatternPool

INSTANCE, PATTERN = "prefill", "pattern"
PAGE_SIZE, BYTES_PER_TOKEN = 64, 656
NUM_LIVE = 2
"""Requests that are published and not yet released."""
REGISTER_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 5.0
DRAIN_NAP_S = 1e-3
WARM_STEPS = 20


def make_layout(num_layers: int) -> CacheLayout:
    return CacheLayout(num_layers, (latent(PAGE_SIZE, range(num_layers), bytes_per_token=BYTES_PER_TOKEN),))


def make_pool(layout: CacheLayout, num_pages: int, on_gpu: bool, device: int) -> PatternPool:
    """Dedicated blocks of cudaMalloc on a GPU, which a process can show its peers and a sidecar alike."""
    owned = {one.name: one.layers for one in layout.components}
    if not on_gpu:
        return PatternPool(layout, owned, num_pages, sparse=True)
    from pdlink.memory.cuda_blocks import CudaBlock
    from pdlink.testing.device_pool import DevicePool

    where = torch.device("cuda", device)
    return DevicePool(layout, owned, num_pages, where, sparse=True, take=lambda nbytes: CudaBlock(nbytes, device))


class Steps:
    """What an engine computes: `num_products` matrix products, waited for, a step."""

    def __init__(self, on_gpu: bool, size: int, num_products: int) -> None:
        torch.set_num_threads(1)
        where, dtype = ("cuda:0", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
        self._on_gpu, self._num_products = on_gpu, num_products
        self._left, self._right = (torch.rand((size, size), device=where).to(dtype) for _ in range(2))
        self._out = torch.empty_like(self._left)

    def launch(self) -> Any:
        """Returns the event behind them; None where they are done."""
        for _ in range(self._num_products):
            torch.mm(self._left, self._right, out=self._out)
        if not self._on_gpu:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def finish(self) -> None:
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()


class Engine:
    """The loop of a scheduler: launch a step, publish what it computes, wait for its end."""

    def __init__(self, worker: PrefillVerbs, steps: Steps, pages: Sequence[int]) -> None:
        self._worker, self._steps, self._pages = worker, steps, pages
        self._live: list[SenderVerbs] = []
        self._number = 0

    def run(self, seconds: float, serves: bool) -> list[float]:
        """How long each step took, in ms."""
        taken = []
        end = time.perf_counter() + seconds
        began = time.perf_counter()
        while began < end:
            event = self._steps.launch()
            if serves:
                self._serve(event)
            self._steps.finish()
            ended = time.perf_counter()
            taken.append((ended - began) * 1e3)
            began = ended
        self._drain()
        return taken

    def _drain(self) -> None:
        """Not measured: let readers have what was published."""
        give_up = time.monotonic() + DRAIN_TIMEOUT_S
        while time.monotonic() < give_up and not all(one.poll().is_final for one in self._live):
            time.sleep(DRAIN_NAP_S)
        for one in self._live:
            one.abort("the measurement has ended")
        self._live.clear()

    def _serve(self, event: Any) -> None:
        self._live = [one for one in self._live if not one.poll().is_final]
        if len(self._live) < NUM_LIVE:
            sender = self._worker.open(f"request-{self._number}")
            sender.publish(self._pages, last=True, ready=event)
            self._live.append(sender)
            self._number += 1


def free_bytes(on_gpu: bool) -> int:
    if not on_gpu:
        return 0
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info(0)[0])


def main() -> None:
    parent, told = Parent(), json.loads(sys.stdin.readline() or "{}")
    if not told:
        return
    on_gpu = bool(told["on_gpu"])
    layout, sizes, rank = make_layout(told["num_layers"]), ParallelSizes(), RankCoordinates()
    plan = LayerPlan.balanced(layout, sizes)
    pages = list(range(told["num_pages"]))
    pool = make_pool(layout, len(pages), on_gpu, 0)
    pool.fill(PATTERN, {"kv": pages})
    steps = Steps(on_gpu, told["size"], told["num_products"])
    for _ in range(WARM_STEPS):
        steps.launch()
    steps.finish()
    before = free_bytes(on_gpu)
    try:
        with open_node(told["sidecar"]) as node:
            whole = PrefillRank(INSTANCE, layout, sizes, rank, plan.kinds, plan.owned[rank], pool.regions)
            worker = node.prefill(whole, [parse_address(told["bootstrap"])])
            worker.wait_registered(REGISTER_TIMEOUT_S)
            parent.say({"link_bytes": before - free_bytes(on_gpu)})
            engine = Engine(worker, steps, pages)
            for line in sys.stdin:
                asked = json.loads(line)
                parent.say({"taken_ms": engine.run(asked["seconds"], asked["serves"])})
    finally:
        pool.close()


if __name__ == "__main__":
    main()
