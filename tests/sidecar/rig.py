"""Owns sidecars for tests: their processes, engines attached to them, and the pattern pools of these."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from pdlink.address import Address
from pdlink.bootstrap.server import BootstrapServer
from pdlink.config import load_settings
from pdlink.decode.links import PrefillInstance
from pdlink.errors import TransferFailed
from pdlink.layout.components import CacheLayout, index_k, latent
from pdlink.layout.layer_plan import LayerPlan
from pdlink.layout.parallel import ParallelSizes, RankCoordinates
from pdlink.prefill.rank import PrefillRank
from pdlink.runtime.node import Node
from pdlink.runtime.verbs import DecodeVerbs, NodeVerbs, PrefillVerbs, SenderVerbs
from pdlink.sidecar import SidecarNode, connect
from pdlink.sidecar.server import SidecarServer
from pdlink.testing.pattern import PatternPool
from tests.processes import PATIENCE_S, wait_until

REPO = Path(__file__).resolve().parents[2]
PAGE_SIZE, NUM_LAYERS, NUM_PAGES = 16, 3, 16
LOOPBACK = Address("127.0.0.1", 0)
INSTANCE = "pre"
Pages = Sequence[int]


def folder_for_sockets() -> tempfile.TemporaryDirectory[str]:
    """Of a short name: a socket's path has few bytes."""
    return tempfile.TemporaryDirectory(prefix="pdl-")


def make_layout() -> CacheLayout:
    layers = range(NUM_LAYERS)
    return CacheLayout(NUM_LAYERS, (latent(PAGE_SIZE, layers, bytes_per_token=656), index_k(PAGE_SIZE, layers)))


def prefill_rank(pool: PatternPool, name: str = INSTANCE) -> PrefillRank:
    """A rank alone, which owns every layer."""
    layout, sizes = make_layout(), ParallelSizes()
    plan = LayerPlan.balanced(layout, sizes)
    rank = RankCoordinates()
    return PrefillRank(name, layout, sizes, rank, plan.kinds, plan.owned[rank], pool.regions)


def make_pool() -> PatternPool:
    layout = make_layout()
    return PatternPool(layout, {one.name: one.layers for one in layout.components}, NUM_PAGES)


@dataclass
class Prefill:
    node: NodeVerbs
    worker: PrefillVerbs
    pool: PatternPool

    def open(self, transfer_id: str, pages: Pages) -> SenderVerbs:
        self.pool.fill(transfer_id, {"kv": pages})
        return self.worker.open(transfer_id)


@dataclass
class Decode:
    node: NodeVerbs
    worker: DecodeVerbs
    pool: PatternPool


class Rig:
    """A bootstrap, and whatever sidecars and engines a test wants. `stack` ends them."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, backend: str = "ipc") -> None:
        self.stack = stack
        self.folder = folder
        self.backend = backend
        self.bootstrap = stack.enter_context(BootstrapServer.start(LOOPBACK))

    @property
    def instance(self) -> PrefillInstance:
        return PrefillInstance(INSTANCE, (self.bootstrap.address,))

    def settings(self) -> dict[str, object]:
        """Short waits, as far as they end what is wrong; long ones where something is only slow."""
        long = dict.fromkeys(
            ("resolve_timeout_s", "connect_timeout_s", "subscribe_timeout_s", "confirm_timeout_s"), 60.0
        )
        return {"backends": self.backend, "resend_interval_s": 0.2, **long}

    def sidecar(self, name: str) -> Path:
        """A sidecar whose own process is this one."""
        return self.server(name).path

    def server(self, name: str, **more: object) -> SidecarServer:
        """The same, with further settings."""
        settings = load_settings({}, **{**self.settings(), **more})
        return self.stack.enter_context(SidecarServer.start(self.folder / name, settings))

    def connect(self, path: Path) -> SidecarNode:
        return self.stack.enter_context(connect(path))

    def node(self) -> Node:
        """The library in this process."""
        return self.stack.enter_context(Node(load_settings({}, **self.settings())))

    def prefill(self, node: NodeVerbs, name: str = INSTANCE) -> Prefill:
        pool = self.pool()
        worker = node.prefill(prefill_rank(pool, name), [self.bootstrap.address])
        worker.wait_registered(PATIENCE_S)
        return Prefill(node, worker, pool)

    def decode(self, node: NodeVerbs, name: str = "dec") -> Decode:
        pool = self.pool()
        return Decode(node, node.decode(name, make_layout(), pool.regions), pool)

    def pool(self) -> PatternPool:
        pool = make_pool()
        self.stack.callback(pool.close)
        return pool


def serve(rig: Rig, prefill: Prefill, decode: Decode, name: str, source: Pages, target: Pages) -> None:
    """One request from end to end, whose bytes arrive, and touch nothing else."""
    decode.pool.wipe()
    sender = prefill.open(name, source)
    pages: Mapping[str, Pages] = {"kv": target}
    receiver = decode.worker.receive(name, rig.instance, pages, len(target) * PAGE_SIZE, expect_aux=True)
    sender.publish(source[:1])
    sender.publish(source[1:], last=True, aux=name.encode())
    assert receiver.wait(PATIENCE_S).aux == name.encode()
    assert decode.pool.find_wrong(name, pages) is None
    assert decode.pool.find_touched(pages) is None
    assert wait_until(lambda: sender.poll().is_final)
    sender.raise_failure()


def serve_at_last(rig: Rig, prefill: Prefill, decode: Decode, name: str, source: Pages, target: Pages) -> None:
    """The same after a restart of the prefill side: decode may hear of it only by a request that fails for that."""
    give_up = time.monotonic() + PATIENCE_S
    for number in itertools.count():
        try:
            serve(rig, prefill, decode, f"{name}-{number}", source, target)
        except TransferFailed as error:
            if "stale" not in str(error) or time.monotonic() > give_up:
                raise
        else:
            return


def serving(node: SidecarNode) -> int:
    """The process that serves an engine, once there is one: while it goes from one to the next there is none."""
    assert wait_until(lambda: node.pid > 0)
    return node.pid


def kill(pid: int, sent: signal.Signals = signal.SIGKILL) -> None:
    assert pid > 0, "a signal to process 0 goes to every process of this run"
    os.kill(pid, sent)


def is_gone(pid: int) -> bool:
    """Whether the process has ended; it may still be waited for."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
