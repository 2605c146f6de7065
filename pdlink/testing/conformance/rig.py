"""Owns what a scenario works with: owners, pools, backends and pulls, all of them ended with it. It asserts no rule."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from pdlink.backends.base import Backend, Peer, PullHandle, PullStatus, Settled
from pdlink.errors import BackendError, PdlinkError
from pdlink.layout.regions import Region
from pdlink.testing.conformance.owner import Owner, Spec
from pdlink.testing.conformance.pool import TRANSFER, count_landed, make_pool
from pdlink.testing.conformance.setup import Setup
from pdlink.testing.pattern import PATTERN_BYTES, PatternPool, page_patterns
from pdlink.transfer.descriptors import PullBatch
from pdlink.transfer.planner import PullPlanner, Source

PULL_TIMEOUT_S = 20.0
SETTLE_S = 0.2
POLL_SLEEP_S = 50e-6


class Broken(PdlinkError):
    """A rule that the backend does not keep."""


class Skipped(PdlinkError):
    """A scenario that this machine cannot run, with the reason."""


def check(kept: object, rule: str) -> None:
    """Raise `Broken` with the rule unless it is kept."""
    if not kept:
        raise Broken(rule)


class Rig:
    """One scenario's world. `close` ends everything that it started."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._stack = ExitStack()
        self._incarnation = time.time_ns()

    def owner(self, **spec: Any) -> Owner:
        """A new owner process; every one has a newer incarnation. Fields as in `Spec`."""
        self._incarnation += 1
        made = Owner(self.setup, Spec(**spec), self._incarnation)
        self._stack.callback(made.process.close)
        return made

    def pool(self, owner: Owner, *, gap: int = 0, num_layers: int | None = None) -> PatternPool:
        """An untouched pool with as many pages as the owner's, of the same size."""
        spec = owner.spec
        layers = spec.num_layers if num_layers is None else num_layers
        size = (layers, spec.num_pages, spec.page_bytes, gap)
        made = make_pool(self.setup.memory, *size, sparse=spec.sparse, device=self.setup.devices[1])
        self._stack.callback(made.close)
        return made

    def backend(self, *regions: Region) -> Backend:
        """A new backend with `regions` registered."""
        made = self.setup.make()
        self._stack.callback(made.close)
        for region in regions:
            made.register(region)
        return made

    def ready(self, **spec: Any) -> tuple[Owner, PatternPool, Backend]:
        """An owner, a pool for its pages and a backend that is connected to it."""
        owner = self.owner(**spec)
        pool = self.pool(owner)
        backend = self.backend(*pool.regions)
        backend.connect(owner.peer)
        return owner, pool, backend

    @property
    def big(self) -> dict[str, int]:
        """The spec of an owner whose pull takes long enough to be met in the middle."""
        return {"num_layers": 2, "num_pages": self.setup.big_pages, "page_bytes": 65536}

    def close(self) -> None:
        self._stack.close()


@contextmanager
def rig_for(setup: Setup) -> Iterator[Rig]:
    rig = Rig(setup)
    try:
        yield rig
    finally:
        rig.close()


# --- pulls ----------------------------------------------------------------------------------------


def make_batch(
    owner: Owner, pool: PatternPool, source: Sequence[int], destination: Sequence[int], rank: int = 0
) -> PullBatch:
    """Pages `source` of every layer of the owner's rank, to pages `destination`."""
    worker_id = owner.peers[rank].worker_id
    planner = PullPlanner(pool.layout, [Source(worker_id, owner.rank_regions[rank])], pool.regions)
    pages = np.array(source, dtype=np.int64), np.array(destination, dtype=np.int64)
    return planner.pull(worker_id, "kv", planner.rows(worker_id, "kv"), *pages)


def whole(owner: Owner, pool: PatternPool, rank: int = 0) -> PullBatch:
    """Every page of every layer, last page first on the destination side, so that no two neighbours merge."""
    pages = range(owner.spec.num_pages)
    return make_batch(owner, pool, pages, pages[::-1], rank)


def damaged(batch: PullBatch, **changes: Callable[[Any], Any]) -> PullBatch:
    """The batch with columns of its layer table or of its runs replaced by what a function makes of them."""
    (move,) = batch.moves
    table = {name: make(getattr(move.layers, name)) for name, make in changes.items() if hasattr(move.layers, name)}
    runs = {name: make(getattr(move.runs, name)) for name, make in changes.items() if hasattr(move.runs, name)}
    return PullBatch(
        batch.worker_id, (replace(move, layers=replace(move.layers, **table), runs=replace(move.runs, **runs)),)
    )


def wait(backend: Backend, handle: PullHandle, timeout_s: float = PULL_TIMEOUT_S) -> PullStatus:
    """Poll as a puller does, until the pull has ended or time is up (PENDING)."""
    give_up = time.monotonic() + timeout_s
    while (status := backend.poll(handle)) is PullStatus.PENDING and time.monotonic() < give_up:
        if not backend.capabilities.works_in_poll:
            time.sleep(max(POLL_SLEEP_S, handle.nap_s))
    return status


def pull(backend: Backend, batch: PullBatch, timeout_s: float = PULL_TIMEOUT_S) -> None:
    """Pull and insist on success."""
    handle = backend.submit(batch)
    status = wait(backend, handle, timeout_s)
    check(status is PullStatus.DONE, f"a pull of {batch.nbytes} bytes ended {status}: {handle.error}")


def pull_part(backend: Backend, batch: PullBatch, pool: PatternPool) -> PullHandle:
    """A pull of which something has landed, and not all of it where that can be seen in time."""
    handle = backend.submit(batch)
    give_up = time.monotonic() + PULL_TIMEOUT_S
    while backend.poll(handle) is PullStatus.PENDING and not count_landed(pool):
        check(time.monotonic() < give_up, f"no page has landed {PULL_TIMEOUT_S:g} s after a pull was submitted")
    return handle


def quieten(backend: Backend, handle: PullHandle, peer: Peer, fence_timeout_s: float) -> tuple[str, ...]:
    """What a puller does with a pull that has not ended well: settle, else fence. Returns whom a fence has broken."""
    give_up = time.monotonic() + SETTLE_S
    while backend.settle(handle) is Settled.NOT_QUIET:
        if time.monotonic() >= give_up:
            started = time.monotonic()
            broken = backend.fence(peer)
            took_s = time.monotonic() - started
            check(peer.worker_id in broken, f"fence of {peer.worker_id} names {broken} as broken")
            check(took_s <= fence_timeout_s, f"fence took {took_s:.1f} s, more than {fence_timeout_s:g} s")
            return broken
        time.sleep(1e-3)
    return ()


def refused(act: Callable[[], object], kind: type[BackendError], what: str) -> BackendError:
    """The error of an act that must be refused."""
    try:
        act()
    except kind as error:
        return error
    raise Broken(f"{what} is not refused")


# --- bytes ----------------------------------------------------------------------------------------


def check_pages(
    pool: PatternPool, source: Sequence[int], destination: Sequence[int], transfer_id: str = TRANSFER
) -> None:
    """Destination pages hold the pattern of their source pages, and nothing else in the pool was written."""
    for region in pool.regions:
        view = pool.view(region.component, region.layer)
        at_once = max(1, PATTERN_BYTES // region.page_bytes)
        for first in range(0, len(source), at_once):
            origins, pages = source[first : first + at_once], list(destination[first : first + at_once])
            wanted = page_patterns(transfer_id, region.component, region.layer, origins, region.page_bytes)
            right = np.all(view[pages] == wanted, axis=1)
            if not np.all(right):
                at = int(np.argmin(right))
                raise Broken(f"layer {region.layer}, page {pages[at]} does not hold page {origins[at]} of its owner")
    touched = pool.find_touched({"kv": destination})
    check(touched is None, f"a page that nobody asked for was written: {touched}")


def check_whole(owner: Owner, pool: PatternPool) -> None:
    pages = range(owner.spec.num_pages)
    check_pages(pool, pages, pages[::-1], owner.spec.transfer_id)


def check_untouched(pool: PatternPool, why: str) -> None:
    touched = pool.find_touched()
    check(touched is None, f"{why}, yet bytes landed: {touched}")


def check_works_again(rig: Rig, owner: Owner, pool: PatternPool, backend: Backend, why: str) -> None:
    """Connect to an owner that lost its reader, and pull everything. `why` says how it was lost.

    Where the setup says that the engine may end such an owner's process, an owner that has ended passes.
    """
    try:
        backend.connect(owner.peer)
        pull(backend, whole(owner, pool))
        check_whole(owner, pool)
    except BackendError:
        if owner.process.is_alive:
            raise
        check(rig.setup.owners_may_end, f"an owner whose reader {why} has ended")
