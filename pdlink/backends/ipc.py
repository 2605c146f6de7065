"""Owns the same-host backend: pulls straight from the owner's memory, page by page, without a staging copy.

It serves host memory that `pdlink.memory.allocate` (or any `shm.Segment`) holds, and device memory that the driver
shares between processes. Host bytes move inside `poll`, on the caller's thread and a bounded number at a time, so such
a pull is quiet whenever `poll` is not running. Device bytes are moved by a kernel of the reading device, which cannot
be stopped, and is over in milliseconds.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from pdlink.backends.base import Backend, Capabilities, Peer, PullHandle, PullStatus, Settled
from pdlink.backends.cuda_copy import Copying
from pdlink.backends.ipc_device import DeviceMappings, Devices, share
from pdlink.backends.ipc_endpoint import IpcEndpoint, SharedSegment, host_identity, parse_endpoint, process_identity
from pdlink.backends.ipc_host import HostMappings, Portion, copy_some
from pdlink.backends.region_spans import Place, PlacedSpans
from pdlink.backends.shm import locate
from pdlink.errors import BackendError, BackendUnavailable, PeerGone, RegionError
from pdlink.layout.regions import MemoryKind, Region
from pdlink.transfer.descriptors import Int64Array, PullBatch

LOOKS_PER_POLL = 8
NAP_S = 20e-6
"""Between two looks at a kernel that takes longer: the caller polls without sleeping."""
LINK_BYTES_PER_S = 390e9
"""Of the NVLink between two H200. About when it would end, a kernel is looked at all the time, up to `SPIN_S`: a nap
takes a good deal longer than it says."""
SPIN_S = 0.3e-3


@dataclass(slots=True, eq=False)
class _Link:
    """A peer as connected. No pull over it moves a byte once it is `broken`: by `fence`, by `close`, or because another
    incarnation took its place."""

    incarnation: int
    host: HostMappings
    devices: DeviceMappings
    broken: bool = False


class _IpcPull(PullHandle, ABC):
    """`link` is held so that the mappings outlive a `disconnect` in the middle of the pull."""

    def __init__(self, batch: PullBatch, link: _Link) -> None:
        super().__init__(batch)
        self.link: _Link | None = link
        self.status = PullStatus.PENDING

    @property
    def may_land(self) -> bool:
        """Whether bytes may land while nobody polls."""
        return False

    @abstractmethod
    def advance(self) -> bool:
        """Move on; whether everything is in place."""

    def end(self, status: PullStatus, error: Exception | None = None) -> None:
        self.status, self.error = status, error
        if not self.may_land:
            self.link = None


class _HostPull(_IpcPull):
    def __init__(self, batch: PullBatch, link: _Link, portions: Iterator[Portion]) -> None:
        super().__init__(batch, link)
        self._portions = portions
        self._left = batch.nbytes

    def advance(self) -> bool:
        self._left -= copy_some(self._portions)
        return self._left <= 0

    def end(self, status: PullStatus, error: Exception | None = None) -> None:
        super().end(status, error)
        self._portions = iter(())


class _DevicePull(_IpcPull):
    def __init__(self, batch: PullBatch, link: _Link, copying: Copying) -> None:
        super().__init__(batch, link)
        self.copying = copying
        self._expected = time.perf_counter() + batch.nbytes / LINK_BYTES_PER_S

    @property
    def may_land(self) -> bool:
        return not self.copying.is_over

    def advance(self) -> bool:
        for _ in range(LOOKS_PER_POLL):
            if self.copying.is_over:
                self.copying.wait()
                return True
        late_s = time.perf_counter() - self._expected
        time.sleep(0 if 0 <= late_s < SPIN_S else NAP_S)
        return False


class IpcBackend(Backend):
    """See `Backend`. Registering host memory is free: it is only remembered, to check destinations and to tell peers.
    The first region of a device prepares that device, which takes part of a second."""

    name = "ipc"
    capabilities = Capabilities(
        frozenset({MemoryKind.HOST, MemoryKind.CUDA}),
        same_host_only=True,
        works_in_poll=True,
        gathers=True,
        files_per_peer=2,  # one for each of its segments
    )

    def __init__(self) -> None:
        self._host = host_identity()
        self._spans = PlacedSpans()
        self._devices = Devices()
        self._peers: dict[str, _Link] = {}
        self._launched: list[_DevicePull] = []
        """Device pulls that may still be under way."""
        self._lock = threading.Lock()

    def register(self, region: Region) -> None:
        if region.memory is MemoryKind.CUDA:
            self._devices.adopt(region)
        self._spans.add(region)

    def deregister(self, region: Region) -> None:
        self._spans.remove(region)

    def endpoint(self) -> bytes:
        """Host identity, and the segments and device allocations of all registered regions, as JSON.

        Raises `RegionError` when a region is in memory that no other process can map.
        """
        host = [self._segment(start, stop) for _, start, stop in self._spans.all(MemoryKind.HOST)]
        segments = tuple(dict.fromkeys(host))
        allocations = share((place.device, start) for place, start, _ in self._spans.all(MemoryKind.CUDA))
        device_spans = tuple(self._spans.merged(MemoryKind.CUDA))
        return IpcEndpoint(self._host, process_identity(), segments, allocations, device_spans).to_bytes()

    def connect(self, peer: Peer) -> None:
        with self._lock:
            known = self._peers.get(peer.worker_id)
        if known and known.incarnation == peer.incarnation:
            return
        told = parse_endpoint(peer)
        if told.host != self._host:
            raise BackendUnavailable(f"{peer.worker_id} runs on another host or with another /dev/shm ({told.host})")
        devices = DeviceMappings(peer.worker_id, told)
        for device in self._spans.devices() if told.allocations else ():
            devices.reach(device)
        link = _Link(peer.incarnation, HostMappings.of(peer.worker_id, told.segments), devices)
        with self._lock:
            replaced = self._peers.get(peer.worker_id)
            self._peers[peer.worker_id] = link
        if replaced and replaced.incarnation != peer.incarnation:
            replaced.broken = True

    def disconnect(self, peer: Peer) -> None:
        with self._lock:
            known = self._peers.get(peer.worker_id)
            if known and known.incarnation == peer.incarnation:
                del self._peers[peer.worker_id]

    def submit(self, batch: PullBatch) -> PullHandle:
        with self._lock:
            link = self._peers.get(batch.worker_id)
        if link is None:
            raise PeerGone(f"{batch.worker_id} is not connected over ipc")
        place = self._destination(batch)
        own = self._spans.of(place)
        if place.memory is MemoryKind.CUDA:
            return self._launch(batch, link, own, place.device)
        return _HostPull(batch, link, link.host.portions(batch.moves, own))

    def _launch(self, batch: PullBatch, link: _Link, own: Int64Array, device: int) -> PullHandle:
        pull = _DevicePull(batch, link, link.devices.start(batch.moves, own, self._devices.copier(device)))
        with self._lock:
            self._launched = [one for one in self._launched if one.may_land] + [pull]
        return pull

    def poll(self, handle: PullHandle) -> PullStatus:
        assert isinstance(handle, _IpcPull)
        if handle.status is not PullStatus.PENDING:
            return handle.status
        if handle.link and handle.link.broken:
            handle.end(PullStatus.FAILED, PeerGone(f"the link to {handle.batch.worker_id} was broken"))
            return handle.status
        try:
            if handle.advance():
                handle.end(PullStatus.DONE)
        except BackendError as error:
            handle.end(PullStatus.FAILED, error)
        return handle.status

    def settle(self, handle: PullHandle) -> Settled:
        assert isinstance(handle, _IpcPull)
        if handle.status is PullStatus.PENDING:
            handle.end(PullStatus.FAILED, BackendError("the pull was stopped before all of it had landed"))
        if handle.may_land:
            return Settled.NOT_QUIET
        handle.link = None
        return Settled.QUIET

    def fence(self, peer: Peer) -> tuple[str, ...]:
        with self._lock:
            link = self._peers.get(peer.worker_id)
            if link and link.incarnation == peer.incarnation:
                link.broken = True
                del self._peers[peer.worker_id]
            launched = [one for one in self._launched if one.batch.worker_id == peer.worker_id]
        for pull in launched:
            while pull.may_land:
                time.sleep(NAP_S)
        return (peer.worker_id,)

    def close(self) -> None:
        with self._lock:
            for link in self._peers.values():
                link.broken = True
            self._peers.clear()
            self._spans.clear()
        self._devices.close()
        self._launched.clear()

    def _segment(self, start: int, stop: int) -> SharedSegment:
        place = locate(start, stop - start)
        if place is None:
            raise RegionError(
                f"memory {start:#x}..{stop:#x} is private to this process, so no peer can read it over ipc; "
                "allocate the pool with pdlink.memory.allocate"
            )
        return SharedSegment(place.name, start - place.offset, place.nbytes)

    def _destination(self, batch: PullBatch) -> Place:
        """Where the batch goes. Raises `RegionError` when that is more than one kind of memory or device."""
        places = {self._spans.place(move.layers.destination_base) for move in batch.moves}
        if len(places) > 1:
            listed = " and ".join(sorted(map(str, places)))
            raise RegionError(
                f"one pull over ipc goes into {listed}; give the components of one pool one kind of memory"
            )
        return places.pop() if places else Place(MemoryKind.HOST)
