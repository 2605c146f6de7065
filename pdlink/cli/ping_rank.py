"""Owns the round trips of `pdlink ping` to one rank: Ping and Pong on its control socket, and reads of one page."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import time
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from pdlink.backends.base import Backend, Peer, PullStatus
from pdlink.backends.registry import open_backends
from pdlink.bootstrap.messages import RankInfo
from pdlink.config import Settings
from pdlink.control.frames import Frame, Ping, Pong
from pdlink.control.loop import Channel, ControlLoop
from pdlink.errors import BackendError, BackendUnavailable, DeadlineExceeded, PdlinkError
from pdlink.layout import CacheLayout, Region
from pdlink.layout.regions import MemoryKind
from pdlink.memory.sharded_pool import LayerShardedPool
from pdlink.transfer.descriptors import GroupMove, LayerTable, PullBatch, pair_pages

log = logging.getLogger("pdlink.cli")
CONTROL = "control"


@dataclass(frozen=True, slots=True)
class Path:
    """What one path to one rank took, per round trip; or why it does not work (`error`), or was not tried."""

    worker_id: str
    name: str
    seconds: tuple[float, ...] = ()
    nbytes: int = 0
    error: str = ""
    skipped: str = ""

    def quantile(self, share: float) -> float:
        """The nearest rank of `share` (1: the longest)."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


class Pinger:
    """What this side needs for it: an I/O thread, transports, and memory for one page. `close` twice is fine."""

    def __init__(self, layout: CacheLayout, settings: Settings, timeout_s: float) -> None:
        self._layout = layout
        self._settings = settings
        self._timeout_s = timeout_s
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as starting:
            self._backends = open_backends(settings.backends, settings)
            for one in self._backends.values():
                starting.callback(one.close)
            self._loop = ControlLoop(settings.max_frame_bytes).start()
            starting.callback(self._loop.close)
            self._stack = starting.pop_all()

    def ping(self, rank: RankInfo, count: int) -> list[Path]:
        """Its control path, and a path for each transport of this side."""
        return [self._control(rank, count), *(self._data(rank, one, count) for one in self._backends.values())]

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Pinger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _control(self, rank: RankInfo, count: int) -> Path:
        heard: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        channel = self._loop.connect(rank.control_endpoint, heard.put, rank.control_keys)
        try:
            self._exchange(rank, channel, heard, 0)  # connects
            took = [self._exchange(rank, channel, heard, number) for number in range(1, count + 1)]
        except PdlinkError as error:
            return Path(rank.worker_id, CONTROL, error=str(error))
        finally:
            channel.close()
        return Path(rank.worker_id, CONTROL, tuple(took))

    def _exchange(self, rank: RankInfo, channel: Channel, heard: queue.SimpleQueue[Frame], nonce: int) -> float:
        began = time.perf_counter()
        channel.send(Frame("", 0, Ping(nonce)))
        give_up = began + self._timeout_s
        while True:
            try:
                body = heard.get(timeout=max(0.0, give_up - time.perf_counter())).body
            except queue.Empty:
                raise DeadlineExceeded(
                    f"no answer at {rank.control_endpoint} for {self._timeout_s:g} s: the process is gone, its I/O "
                    "thread is stuck, or something on the way drops what is sent there"
                ) from None
            if isinstance(body, Pong) and body.nonce == nonce:
                if body.incarnation != rank.incarnation:
                    raise PdlinkError(f"incarnation {body.incarnation} answers, and {rank.incarnation} is registered")
                return time.perf_counter() - began

    def _data(self, rank: RankInfo, backend: Backend, count: int) -> Path:
        source = _source(rank, backend)
        if not rank.regions:
            return Path(rank.worker_id, backend.name, skipped="the rank owns nothing to read")
        if backend.name not in rank.transports:
            return Path(rank.worker_id, backend.name, skipped=f"offered are {', '.join(rank.transports)}")
        if source is None or source.memory is not MemoryKind.HOST:
            return Path(rank.worker_id, backend.name, skipped=f"what it serves lies in {rank.regions[0].memory} memory")
        pool = LayerShardedPool(self._layout, {source.component: (source.layer,)}, 1)
        peer = Peer(rank.worker_id, rank.incarnation, rank.transports[backend.name])
        (target,) = pool.regions()
        try:
            backend.register(target)
            backend.connect(peer)
            try:
                batch = _one_page(rank.worker_id, self._layout, source, target)
                self._pull(backend, peer, batch)  # what the first one sets up is not measured
                took = tuple(self._pull(backend, peer, batch) for _ in range(count))
            finally:
                backend.disconnect(peer)
        except BackendUnavailable as error:
            return Path(rank.worker_id, backend.name, skipped=str(error))
        except PdlinkError as error:
            return Path(rank.worker_id, backend.name, error=str(error))
        finally:
            backend.deregister(target)
            pool.close()
        return Path(rank.worker_id, backend.name, took, batch.nbytes)

    def _pull(self, backend: Backend, peer: Peer, batch: PullBatch) -> float:
        """Read it once. When this returns or raises, nothing can land any more."""
        began = time.perf_counter()
        try:
            handle = backend.submit(batch)
            while (status := backend.poll(handle)) is PullStatus.PENDING:
                if time.perf_counter() - began > self._timeout_s:
                    raise DeadlineExceeded(f"no page came for {self._timeout_s:g} s")
                time.sleep(handle.nap_s)
            if status is PullStatus.FAILED:
                raise BackendError(str(handle.error or "the transport does not say why"))
        except BaseException:
            backend.fence(peer)
            raise
        return time.perf_counter() - began


def _source(rank: RankInfo, backend: Backend) -> Region | None:
    """Where a page of the rank may be read over a transport, whatever it holds; None where this side cannot. Of a rank
    of which only staging slots can be read over it, the first of these."""
    found = next((one for one in rank.regions if one.memory in backend.capabilities.memory), None)
    if found is None or backend.name not in rank.staged_only:
        return found
    area = rank.staging
    if area is None or backend.name not in area.backends or area.slot_bytes < found.page_bytes:
        return None
    size = (found.page_bytes, found.page_bytes, 1)
    return Region(found.component, found.layer, area.base_address, *size, area.memory, area.device)


def _one_page(worker_id: str, layout: CacheLayout, source: Region, target: Region) -> PullBatch:
    """The first page of one region, into the only page of another."""
    page_bytes = layout.component(source.component).page_bytes
    columns = (0, source.base_address, source.page_stride, target.base_address, target.page_stride, page_bytes)
    table = LayerTable(*(np.array([one], dtype=np.int64) for one in columns))
    first = np.zeros(1, dtype=np.int64)
    group = layout.component(source.component).page_group
    return PullBatch(worker_id, (GroupMove(group, pair_pages(first, first), table),))
