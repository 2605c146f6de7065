"""Owns whole links for tests: a bootstrap service, and prefill and decode ranks over real sockets, with pattern pools.

`Site` keeps what it started and ends it. Every rank has a node of its own, as if it were a process.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pdlink.address import Address
from pdlink.backends.base import Backend, Peer, PullHandle, PullStatus, Settled
from pdlink.backends.wrapped import WrappedBackend
from pdlink.bootstrap.server import BootstrapServer
from pdlink.config import load_settings
from pdlink.decode.links import PrefillInstance
from pdlink.decode.receiver import Receiver
from pdlink.decode.worker import DecodeWorker
from pdlink.layout.components import CacheLayout, index_k, latent
from pdlink.layout.layer_plan import LayerPlan, OwnedLayers, PlanKind
from pdlink.layout.parallel import ParallelSizes
from pdlink.prefill.rank import PrefillRank
from pdlink.prefill.sender import Sender
from pdlink.prefill.worker import PrefillWorker
from pdlink.runtime.node import Node
from pdlink.testing.pattern import PatternPool
from pdlink.transfer.descriptors import PullBatch
from pdlink.transfer.states import SenderState
from tests.processes import PATIENCE_S

DEADLINE_S = 60.0
LOOK_S = 0.002
# What takes longer than this on a slow and busy machine is lost; tests of these limits set their own.
PATIENT = {"resolve_timeout_s": 60.0, "connect_timeout_s": 60.0, "subscribe_timeout_s": 60.0, "confirm_timeout_s": 30.0}
PAGE_SIZE = 64
LOOPBACK = Address("127.0.0.1", 0)
Pages = Mapping[str, Sequence[int]]


def make_layout(num_layers: int, *, page_size: int = PAGE_SIZE, latent_bytes: int = 656) -> CacheLayout:
    layers = range(num_layers)
    return CacheLayout(
        num_layers, (latent(page_size, layers, bytes_per_token=latent_bytes), index_k(page_size, layers))
    )


@dataclass
class Owner:
    """One prefill rank: its node, worker and pool, and the pages that its current request took."""

    node: Node
    worker: PrefillWorker
    pool: PatternPool
    taken: dict[str, list[int]] = field(default_factory=dict)

    def open(self, transfer_id: str, pages: Pages, start: Mapping[str, int] | None = None) -> Sender:
        """Fill pages with the request's pattern and open it."""
        self.taken = {group: list(ids) for group, ids in pages.items()}
        self.pool.fill(transfer_id, pages, start)
        return self.worker.open(transfer_id)


@dataclass
class Decode:
    node: Node
    worker: DecodeWorker
    pool: PatternPool


class Site:
    """One prefill instance and its decode ranks. Settings are those of every node; `deadline` names a test's limit."""

    def __init__(self, stack: contextlib.ExitStack, **settings: object) -> None:
        self._stack = stack
        self.settings = load_settings({}, **(PATIENT | settings))
        self.bootstrap = stack.enter_context(BootstrapServer.start(LOOPBACK))
        self.random = random.Random(5)

    def prefill(
        self,
        layout: CacheLayout,
        cp: int,
        *,
        name: str = "pre",
        kind: PlanKind = PlanKind.SPLIT,
        num_pages: int = 16,
        register: bool = True,
        **settings: object,
    ) -> list[Owner]:
        sizes = ParallelSizes(cp=cp)
        plan = LayerPlan.balanced(layout, sizes, kind)
        owners = []
        for rank in sizes.ranks():
            pool = self.pool(layout, plan.owned[rank], num_pages)
            node = self.node(**settings)
            info = PrefillRank(name, layout, sizes, rank, plan.kinds, plan.owned[rank], pool.regions)
            owners.append(Owner(node, node.prefill(info, [self.bootstrap.address] if register else []), pool))
        for owner in owners if register else ():
            owner.worker.wait_registered(DEADLINE_S)
        return owners

    def decode(
        self,
        layout: CacheLayout,
        *,
        name: str = "dec",
        num_pages: int = 16,
        page_gap: int = 0,
        wrap: Callable[[Backend], Backend] | None = None,
        **settings: object,
    ) -> Decode:
        whole = {one.name: one.layers for one in layout.components}
        pool = self.pool(layout, whole, num_pages, page_gap)
        node = self.node(**settings)
        if wrap:
            best = next(iter(node.backends))
            node.backends[best] = wrap(node.backends[best])
        return Decode(node, node.decode(name, layout, pool.regions), pool)

    def node(self, **settings: object) -> Node:
        node = Node(self.settings.model_copy(update=settings))
        self._stack.callback(lambda: _check(node))
        return self._stack.enter_context(node)

    @property
    def instance(self) -> PrefillInstance:
        return PrefillInstance("pre", (self.bootstrap.address,))

    def scatter(self, pool: PatternPool, num_pages: int) -> list[int]:
        """Pages in no order and with gaps."""
        return self.random.sample(range(pool.num_pages), num_pages)

    def pool(self, layout: CacheLayout, owned: OwnedLayers, num_pages: int = 16, page_gap: int = 0) -> PatternPool:
        pool = PatternPool(layout, owned, num_pages, page_gap=page_gap)
        self._stack.callback(pool.close)
        return pool


def _check(node: Node) -> None:
    assert node.loop.counters.handler_errors == 0


def wait_until(holds: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Wait for something that another thread brings about."""
    give_up = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() >= give_up:
            raise AssertionError(f"not so within {timeout_s:g} s")
        time.sleep(LOOK_S)


def assert_all(senders: Sequence[Sender], state: SenderState) -> None:
    """Every sender comes to `state`."""
    wait_until(lambda: all(one.poll().is_final for one in senders))
    assert [one.poll() for one in senders] == [state] * len(senders)


def assert_whole(decode: Decode, transfer_id: str, pages: Pages, start: Mapping[str, int] | None = None) -> None:
    """The destination holds the request's bytes, and nothing else was touched."""
    assert decode.pool.find_wrong(transfer_id, pages, start) is None
    assert decode.pool.find_touched(pages) is None


def finished(receiver: Receiver) -> Receiver:
    """The receiver, once it has a final state."""
    wait_until(lambda: receiver.poll().is_final)
    return receiver


class Gate(WrappedBackend):
    """A backend whose pulls wait in `poll` until `open` is set; everything else is the inner one's.

    `settle` says NOT_QUIET until `quiet` is set, as a transport does that cannot take back what it posted.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.open = threading.Event()
        self.quiet = threading.Event()
        self.quiet.set()
        self.held = threading.Semaphore(0)
        self.held_of: set[str] = set()
        """Owners that a pull was posted to."""
        self.fenced: list[str] = []

    def poll(self, handle: PullHandle) -> PullStatus:
        if not self.open.wait(0.01):
            return PullStatus.PENDING
        return self.inner.poll(handle)

    def submit(self, batch: PullBatch) -> PullHandle:
        handle = self.inner.submit(batch)
        self.held_of.add(batch.worker_id)
        self.held.release()
        return handle

    def settle(self, handle: PullHandle) -> Settled:
        return self.inner.settle(handle) if self.quiet.is_set() else Settled.NOT_QUIET

    def fence(self, peer: Peer) -> tuple[str, ...]:
        self.fenced.append(peer.worker_id)
        return self.inner.fence(peer)

    def wait_held(self, num_pulls: int) -> None:
        for _ in range(num_pulls):
            assert self.held.acquire(timeout=DEADLINE_S), "a pull was not posted"

    def wait_held_of(self, num_owners: int) -> None:
        """Until pulls from that many owners were posted: two pieces may well be of one of them."""
        wait_until(lambda: len(self.held_of) >= num_owners, DEADLINE_S)
