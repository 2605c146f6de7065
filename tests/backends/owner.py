"""Owns a process that holds pages for the ipc tests: it tells where they are, and keeps them until its input ends.

Run as `python -m tests.backends.owner '{"num_layers": 2, "num_pages": 8, "gap": 0, "transfer_id": "t"}'`. One line of
JSON comes out. Page p of each layer holds the pattern of page position p.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

from pdlink.backends.base import Backend, Peer, PullStatus
from pdlink.backends.ipc import IpcBackend
from pdlink.layout import CacheLayout, MemoryKind, Region
from pdlink.layout.components import index_k, latent
from pdlink.testing.child import Child
from pdlink.testing.parent import Parent
from pdlink.testing.pattern import PatternPool, page_pattern
from pdlink.transfer.descriptors import PullBatch
from pdlink.transfer.planner import PullPlanner, Source
from tests.transfer.values import ints

REPO = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0


def make_layout(num_layers: int) -> CacheLayout:
    """Pages that are no multiple of a machine word: 4 tokens of 35 and 13 bytes."""
    return CacheLayout(
        num_layers,
        (
            latent(4, range(num_layers), bytes_per_token=35),
            index_k(4, range(0, num_layers, 2), key_bytes=12, scale_bytes=1),
        ),
    )


def make_pool(num_layers: int, num_pages: int, gap: int = 0) -> PatternPool:
    layout = make_layout(num_layers)
    return PatternPool(layout, {one.name: one.layers for one in layout.components}, num_pages, page_gap=gap)


def make_planner(
    regions: Sequence[Region],
    pool: PatternPool,
    worker_id: str = "w0",
    wanted: Mapping[str, Sequence[int]] | None = None,
) -> PullPlanner:
    return PullPlanner(pool.layout, [Source(worker_id, tuple(regions))], pool.regions, wanted)


def make_batch(planner: PullPlanner, source: Sequence[int], destination: Sequence[int]) -> PullBatch:
    (worker_id,) = planner.worker_ids
    return planner.pull(worker_id, "kv", planner.rows(worker_id, "kv"), ints(source), ints(destination))


def find_wrong(pool: PatternPool, transfer_id: str, source: Sequence[int], destination: Sequence[int]) -> list:
    """(component, layer, page) of every page that does not hold what its source page held."""
    return [
        (component, layer, page)
        for component, layer in pool.layout.cells()
        for origin, page in zip(source, destination, strict=True)
        if bytes(pool.view(component, layer)[page])
        != bytes(page_pattern(transfer_id, component, layer, origin, pool.layout.component(component).page_bytes))
    ]


def serving(pool: PatternPool) -> IpcBackend:
    """A backend with the pool's regions registered."""
    backend = IpcBackend()
    for region in pool.regions:
        backend.register(region)
    return backend


def pull(backend: Backend, batch: PullBatch) -> PullStatus:
    """How the batch ended."""
    handle = backend.submit(batch)
    while (status := backend.poll(handle)) is PullStatus.PENDING:
        pass
    return status


@dataclass
class Owner:
    """The other process, as the tests see it."""

    process: Child
    peer: Peer
    regions: tuple[Region, ...]

    def kill(self) -> None:
        self.process.kill()


@contextmanager
def running(transfer_id: str = "t", *, gap: int = 0, incarnation: int = 1, num_pages: int = 32) -> Iterator[Owner]:
    spec = {"num_layers": 3, "num_pages": num_pages, "gap": gap, "transfer_id": transfer_id}
    with Child("owner", "tests.backends.owner", [json.dumps(spec)], {"PYTHONPATH": str(REPO)}) as process:
        told = process.hear(START_TIMEOUT_S)
        regions = tuple(Region(*one[:6], MemoryKind(one[6]), one[7]) for one in told["regions"])
        yield Owner(process, Peer("w0", incarnation, told["endpoint"].encode()), regions)


def main(text: str) -> None:
    parent, spec = Parent(), json.loads(text)
    pool = make_pool(spec["num_layers"], spec["num_pages"], spec["gap"])
    pool.fill(spec["transfer_id"], {"kv": range(spec["num_pages"])})
    backend = serving(pool)
    told = {"endpoint": backend.endpoint().decode(), "regions": [astuple(one) for one in pool.regions]}
    parent.say(told)
    sys.stdin.read()
    backend.close()
    pool.close()


if __name__ == "__main__":
    main(sys.argv[1])
