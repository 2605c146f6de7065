"""Owns the nixl backend: pulls over UCX, whatever that finds (RDMA, tcp, a kernel copy on one host).

Own regions are registered with a serving agent when peers are told of them, and with one pulling agent for each peer.
UCX chooses devices and transports; UCX_TLS and UCX_NET_DEVICES steer it, and UCX_LOG_LEVEL=info shows what it took.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import ExitStack

from pdlink.address import Address
from pdlink.backends.base import Backend, Capabilities, Peer, PullHandle, PullStatus, Settled
from pdlink.backends.cuda_driver import num_devices
from pdlink.backends.nixl_endpoint import RegionTable
from pdlink.backends.nixl_link import NixlLink, NixlPull
from pdlink.backends.nixl_server import NixlServer
from pdlink.config import Settings
from pdlink.errors import PeerGone, RegionError
from pdlink.layout.regions import MemoryKind, Region
from pdlink.transfer.descriptors import PullBatch

log = logging.getLogger("pdlink.backends")
FILES_PER_PEER = 9
"""Of the agent that pulls from a peer over UCX 1.23, its connection over tcp included, as measured."""


class NixlBackend(Backend):
    """See `Backend`. Registering is free until an endpoint is asked for or a peer is connected.

    Regions may lie in host memory and on CUDA devices at once. Between devices of one host UCX takes `cuda_ipc`, unless
    UCX_TLS keeps it out.
    """

    name = "nixl"
    capabilities = Capabilities(frozenset({MemoryKind.HOST}), files_per_peer=FILES_PER_PEER)

    def __init__(self, settings: Settings) -> None:
        """Start the engine. Raises `BackendUnavailable` when nixl is not installed or finds no transport.

        UCX listens on every interface that it may use. Where pdlink itself is reached over loopback only, so is UCX,
        unless UCX_NET_DEVICES says otherwise.
        """
        if Address(settings.bind_host, 0).is_loopback:
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        if num_devices():
            self.capabilities = Capabilities(frozenset(MemoryKind), files_per_peer=FILES_PER_PEER)
        self._server = NixlServer(lambda death: self.on_death(death))
        self._lock = threading.Lock()
        self._regions: dict[Region, int] = {}
        self._table = RegionTable.of(())
        self._links: dict[str, NixlLink] = {}
        self._closed = False
        log.info(
            "nixl over UCX, UCX_TLS=%s, UCX_NET_DEVICES=%s; UCX_LOG_LEVEL=info shows the devices of every link",
            os.environ.get("UCX_TLS", "all"),
            os.environ.get("UCX_NET_DEVICES", "all"),
        )

    def register(self, region: Region) -> None:
        if region.memory not in self.capabilities.memory:
            raise RegionError(
                f"backend nixl serves host memory here, where no CUDA device is visible; {region.component!r} layer "
                f"{region.layer} is on {region.memory} device {region.device}"
            )
        with self._lock:
            self._regions[region] = self._regions.get(region, 0) + 1
            self._table = RegionTable.of(self._regions)

    def deregister(self, region: Region) -> None:
        with self._lock:
            if region not in self._regions:
                return
            self._regions[region] -= 1
            if not self._regions[region]:
                del self._regions[region]
                self._table = RegionTable.of(self._regions)
                self._server.keep_only(self._table)

    def endpoint(self) -> bytes:
        with self._lock:
            self._check_open()
            return self._server.endpoint(self._table)

    def serve(self, owner: str, num_readers: int) -> None:
        self._server.serve(owner, num_readers)

    def connect(self, peer: Peer) -> None:
        with self._lock:
            self._check_open()
            known = self._links.get(peer.worker_id)
            table = self._table
        if known and known.peer.incarnation == peer.incarnation and known.is_usable:
            return
        if known:
            known.take_down("another connection has taken its place")
        made = NixlLink(peer, table)
        with self._lock:
            replaced = self._links.get(peer.worker_id)
            if not self._closed:
                self._links[peer.worker_id] = made
        if self._closed:
            made.take_down("the backend was closed")
            raise PeerGone("backend nixl is closed")
        if replaced and replaced is not known:
            replaced.take_down("another connection has taken its place")

    def disconnect(self, peer: Peer) -> None:
        self._drop(peer, "it was disconnected")

    def submit(self, batch: PullBatch) -> PullHandle:
        with self._lock:
            link, table = self._links.get(batch.worker_id), self._table
        if link is None:
            raise PeerGone(f"{batch.worker_id} is not connected over nixl")
        return link.submit(batch, table)

    def poll(self, handle: PullHandle) -> PullStatus:
        assert isinstance(handle, NixlPull)
        return handle.link.poll(handle)

    def settle(self, handle: PullHandle) -> Settled:
        assert isinstance(handle, NixlPull)
        return handle.link.settle(handle)

    def fence(self, peer: Peer) -> tuple[str, ...]:
        self._drop(peer, "it was fenced")
        return (peer.worker_id,)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            links, self._links = list(self._links.values()), {}
        with ExitStack() as stack:  # whatever one of them raises, the others are taken down too
            stack.callback(self._server.close)
            for link in links:
                stack.callback(link.take_down, "the backend was closed")

    def _drop(self, peer: Peer, why: str) -> None:
        with self._lock:
            link = self._links.get(peer.worker_id)
            if link is None or link.peer.incarnation != peer.incarnation:
                return
        link.take_down(why)
        with self._lock:
            if self._links.get(peer.worker_id) is link:
                del self._links[peer.worker_id]

    def _check_open(self) -> None:
        if self._closed:
            raise PeerGone("backend nixl is closed")
