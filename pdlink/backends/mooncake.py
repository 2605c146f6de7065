"""Owns the mooncake backend: peers, registered memory and range checks, over engines that move the bytes.

One engine serves this process's memory; each peer that it pulls from has another one (see `mooncake_link`). So `fence`
ends one link's engine, which is quiet from then on, and breaks nobody else. Every read's state is exact and asked for
without blocking: a pull is quiet as soon as its last open read has ended. Nothing waits for the library's own timeout.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from pdlink.address import Address, advertised, parse_address
from pdlink.backends.base import Backend, Capabilities, Peer, PullHandle, PullStatus, Settled
from pdlink.backends.cuda_driver import num_devices
from pdlink.backends.mooncake_engine import NVLINK, Engine, Span, is_cpu_build, load
from pdlink.backends.mooncake_link import Batch, Link, MooncakePull, Opening, batches_of, window_of
from pdlink.backends.ranges import as_spans
from pdlink.backends.region_spans import PlacedSpans, merge
from pdlink.config import Settings, load_settings
from pdlink.errors import AddressError, BackendError, BackendUnavailable, LimitReached, PeerGone, RegionError
from pdlink.layout.regions import MAX_ADDRESS, MemoryKind, Region
from pdlink.threads import Death
from pdlink.transfer.descriptors import Int64Array, PullBatch

MAX_ENDPOINT_BYTES = 64 << 10
FILES_PER_PEER = 23
"""Of the engine that reads from a peer: 7 as measured, and the 16 connections that it may open over tcp."""
MAX_OPENINGS = 64
"""Peers that are waited for at once though they do not answer; the library cannot be told to stop."""


@dataclass(frozen=True, slots=True)
class _Told:
    """A peer's endpoint, checked. `session` is empty when it has no memory to read."""

    session: str
    spans: list[Span]


class MooncakeBackend(Backend):
    """See `Backend`. Reads `bind_host`, `advertise_host`, `connect_timeout_s` and `mooncake_protocol` of the settings.

    `poll` sleeps for up to a millisecond when nothing has landed. Raises `BackendUnavailable` when the library cannot
    be loaded; engines start when they are needed.
    """

    name = "mooncake"

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or load_settings()
        self._protocol = self._settings.mooncake_protocol
        self._host = self._settings.advertise_host or self._settings.bind_host
        self._window = window_of(self._protocol)
        load(self._host, self._protocol)
        self.capabilities = Capabilities(
            _memory(self._protocol),
            same_host_only=self._protocol == NVLINK,
            files_per_peer=FILES_PER_PEER,
        )
        self._spans = PlacedSpans()
        self._serving: Engine | None = None
        self._peers: dict[str, tuple[Link, Int64Array]] = {}
        self._links: list[Link] = []
        """Every link that may still have reads in flight, forgotten peers' included."""
        self._openings: dict[tuple[str, int], Opening] = {}
        self._closed = False
        self._lock = threading.Lock()
        self._memory_lock = threading.Lock()

    def register(self, region: Region) -> None:
        if region.memory not in self.capabilities.memory:
            served = " and ".join(sorted(self.capabilities.memory))
            raise RegionError(
                f"backend mooncake over {self._protocol} serves {served} memory here; {region.component!r} layer "
                f"{region.layer} is on {region.memory} device {region.device}"
            )
        self._spans.add(region)
        try:
            self._offer()
        except RegionError:
            self._spans.remove(region)
            raise

    def deregister(self, region: Region) -> None:
        """As the base says. Reads that peers begin later fail; one under way may read one chunk more."""
        self._spans.remove(region)
        self._offer()

    def endpoint(self) -> bytes:
        """Protocol, address and spans as JSON. Starts the engine that serves them, unless there are none.

        Raises `BackendUnavailable` when it does not start, `RegionError` when there are too many spans to tell, and
        `AddressError` for a wildcard that cannot be told either.
        """
        advertised(Address(self._settings.bind_host, 0), self._settings.advertise_host)
        spans = self._spans.merged()
        session = self._serve() if spans else ""
        told = json.dumps(
            {"protocol": self._protocol, "session": session, "spans": spans}, separators=(",", ":")
        ).encode()
        if len(told) > MAX_ENDPOINT_BYTES:
            raise RegionError(
                f"{len(spans)} separate memory ranges do not fit a mooncake endpoint of {MAX_ENDPOINT_BYTES} bytes; "
                "allocate the pool as fewer, larger tensors"
            )
        return told

    def connect(self, peer: Peer) -> None:
        with self._lock:
            if self._closed:
                raise BackendUnavailable("this mooncake backend is closed")
            if _is_link_to(peer, self._peers.get(peer.worker_id)):
                return
        told = self._parse(peer)
        link = self._open(peer, told)
        with self._lock:
            present = self._peers.get(peer.worker_id)
            keep = not self._closed and not _is_link_to(peer, present)
            if keep:
                self._peers[peer.worker_id] = (link, as_spans(told.spans))
                self._links = [one for one in self._links if one.is_open] + [link]
        if not keep:  # another caller was faster, and may be pulling over its link already
            link.close()
            return
        link.offer(self._spans.merged())  # memory may have come while the peer was being reached
        if present:
            present[0].close()

    def disconnect(self, peer: Peer) -> None:
        """Forget `peer`. A pull of it that another caller still polls goes on to its end."""
        with self._lock:
            known = self._peers.get(peer.worker_id)
            if known is None or known[0].peer.incarnation != peer.incarnation:
                return
            del self._peers[peer.worker_id]
        known[0].retire()

    def submit(self, batch: PullBatch) -> PullHandle:
        with self._lock:
            known = self._peers.get(batch.worker_id)
        if known is None or not known[0].is_open:
            raise PeerGone(f"{batch.worker_id} is not connected over mooncake")
        link, theirs = known
        ours = self._spans.merged_array()

        def make() -> Iterator[Batch]:
            for move in batch.moves:
                link.ranges.check(move, theirs, batch.worker_id, ours)  # the library writes wherever it is told to
            return batches_of(batch, link.window)

        pull = MooncakePull(batch, link, link.plans.parts(batch, ours, make))
        link.advance(pull)  # now, and not when its caller first looks
        return pull

    def poll(self, handle: PullHandle) -> PullStatus:
        assert isinstance(handle, MooncakePull)
        if handle.status is not PullStatus.PENDING:
            return handle.status
        handle.link.advance(handle)
        return handle.status

    def settle(self, handle: PullHandle) -> Settled:
        assert isinstance(handle, MooncakePull)
        handle.fail(BackendError("the pull was stopped before all of it had landed"))
        return Settled.QUIET if handle.link.drain(handle) else Settled.NOT_QUIET

    def fence(self, peer: Peer) -> tuple[str, ...]:
        with self._lock:
            known = self._peers.get(peer.worker_id)
            if known and known[0].peer.incarnation == peer.incarnation:
                del self._peers[peer.worker_id]
            links = [one for one in self._links if _is_same(one.peer, peer)]
        for link in links:
            link.close()
        with self._lock:
            self._links = [one for one in self._links if one.is_open]
        return (peer.worker_id,)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            links, self._links = self._links, []
            self._peers.clear()
        for link in links:
            link.close()
        with self._memory_lock:
            self._spans.clear()
            serving, self._serving = self._serving, None
            if serving:
                serving.close()

    def _serve(self) -> str:
        """The session of the serving engine, which knows all registered memory then."""
        with self._memory_lock:
            if self._serving is None:
                started = self._start()
                started.offer(self._spans.merged())
                self._serving = started
            return self._serving.session

    def _start(self) -> Engine:
        try:
            # Before any region is known a peer may be reached already; over nvlink that needs a device too.
            device = min(self._spans.devices(), default=None)
            return Engine(self._host, self._protocol, 0 if device is None and self._protocol == NVLINK else device)
        except AddressError as error:
            raise BackendUnavailable(f"backend mooncake cannot serve on {self._host!r}: {error}") from error

    def _offer(self) -> None:
        """Bring what the running engines know up to date."""
        with self._lock:
            links = list(self._links)
        with self._memory_lock:
            spans = self._spans.merged()
            if self._serving:
                self._serving.offer(spans)
            for link in links:
                link.offer(spans)

    def _open(self, peer: Peer, told: _Told) -> Link:
        key = (peer.worker_id, peer.incarnation)
        with self._lock:
            self._openings = {who: one for who, one in self._openings.items() if not one.is_over}
            if key not in self._openings and len(self._openings) >= MAX_OPENINGS:
                raise PeerGone(
                    f"{peer.worker_id} is not tried over mooncake: {len(self._openings)} peers do not answer, and each "
                    "keeps a thread and an engine of this process"
                )
            stuck = self._openings.pop(key, None)
        if stuck and not stuck.is_over:
            with self._lock:
                self._openings[key] = stuck
            raise PeerGone(f"{peer.worker_id} at {told.session} has not answered mooncake yet")
        engine = self._start()
        with self._memory_lock:
            engine.offer_destinations(self._spans.merged())
        if not told.spans:
            return Link(peer, told.session, engine, self._window)
        try:
            opening = Opening(peer, told.session, told.spans[0][0], engine, self._window, self._tell_death)
        except LimitReached as error:
            engine.close()
            raise BackendError(str(error)) from error
        try:
            return opening.link(self._settings.connect_timeout_s)
        except PeerGone:
            if not opening.is_over:
                with self._lock:
                    self._openings[key] = opening
            raise

    def _tell_death(self, death: Death) -> None:
        self.on_death(death)

    def _parse(self, peer: Peer) -> _Told:
        """Raises `BackendUnavailable` for what cannot be read, makes no sense, or moves over something else."""
        try:
            blob = json.loads(peer.endpoint)
            protocol, session = str(blob["protocol"]), str(blob["session"])
            spans = [(int(start), int(stop)) for start, stop in blob["spans"]]
            if session or spans:
                parse_address(session)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise BackendUnavailable(
                f"{peer.worker_id} offers a mooncake endpoint that cannot be read: {error}"
            ) from error
        if protocol != self._protocol:
            raise BackendUnavailable(
                f"{peer.worker_id} moves mooncake over {protocol}, this process over {self._protocol}; set "
                "PDLINK_MOONCAKE_PROTOCOL alike on both"
            )
        for start, stop in spans:
            if not 0 < start < stop <= MAX_ADDRESS:
                raise BackendUnavailable(f"{peer.worker_id} offers memory {start:#x}..{stop:#x} over mooncake")
        return _Told(session, merge(sorted(spans)))


def _memory(protocol: str) -> frozenset[MemoryKind]:
    if protocol == NVLINK:
        return frozenset({MemoryKind.CUDA})
    return frozenset(MemoryKind) if num_devices() and not is_cpu_build() else frozenset({MemoryKind.HOST})


def _is_link_to(peer: Peer, known: tuple[Link, Int64Array] | None) -> bool:
    return known is not None and known[0].is_open and _is_same(known[0].peer, peer)


def _is_same(one: Peer, other: Peer) -> bool:
    return one.worker_id == other.worker_id and one.incarnation == other.incarnation
