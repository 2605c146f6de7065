"""Owns the interface of a backend: what moves bytes and describes itself. Retry, merge, deadlines and failure policy
exist once, above it, and not here.

The memory rule. From `submit` until the pull is QUIET, the backend may write the destination ranges of the batch, and
the caller neither reads nor hands out those pages. DONE means that the bytes are visible and the engine is quiet.
FAILED, or an exception, promises neither: the destination may hold anything, and bytes may still land until `settle`
says QUIET or `fence` has returned. `settle` never says QUIET by guess.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from pdlink.layout.regions import MemoryKind, Region
from pdlink.threads import Death
from pdlink.transfer.descriptors import PullBatch
from pdlink.transfer.timings import PullTimings


class PullStatus(StrEnum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Settled(StrEnum):
    QUIET = "quiet"
    NOT_QUIET = "not_quiet"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Facts about a backend, for selection and planning.

    `memory` are the kinds that it can read from and write to; `same_host_only` that both sides must share a host;
    `max_descriptors` caps one posted batch (0: no cap). `works_in_poll` that bytes move inside `poll` and wait for no
    peer, so that a caller need not sleep between two polls, and may pull a few of them on a thread that others need.
    `gathers` that a pull reads pages straight from the owner's mapped memory, so that packing them first could only
    cost. `files_per_peer` are the open files that a connected peer costs, in itself and in the connection.
    `cost_per_descriptor_s` and `bytes_per_s` are what one more descriptor and the bytes of a pull take (0: next to
    nothing, or unknown). `staged_only` that pages do not lie in memory which is registered with it, so that it moves
    bytes between staging slots alone.
    """

    memory: frozenset[MemoryKind]
    same_host_only: bool = False
    max_descriptors: int = 0
    works_in_poll: bool = False
    gathers: bool = False
    files_per_peer: int = 0
    cost_per_descriptor_s: float = 0.0
    bytes_per_s: float = 0.0
    staged_only: bool = False


@dataclass(frozen=True, slots=True)
class Peer:
    """A prefill rank to pull from: its name, the process that now carries it, and its `endpoint()` blob."""

    worker_id: str
    incarnation: int
    endpoint: bytes


class PullHandle:
    """One submitted batch. Opaque to callers; a backend subclasses it."""

    def __init__(self, batch: PullBatch) -> None:
        self.batch = batch
        self.error: Exception | None = None
        """Why the pull failed, once its status is FAILED."""
        self.timings = PullTimings()
        """What the backend adds to it: `post_s`, and `prep_s` of what it makes after `submit`. May stay zero."""
        self.nap_s = 0.0
        """How long a caller that finds it pending does well to wait before it looks again, as of the last `poll`."""


class Backend(ABC):
    """Moves bytes from peers' regions into own regions. `name` is how peers and settings call it.

    Threads: `register`, `deregister`, `endpoint`, `connect` and `close` may come from any thread; a peer's `submit`,
    `poll`, `settle` and `fence` come from one thread at a time. Errors are `BackendError` and its subclasses.
    """

    name: str
    capabilities: Capabilities
    on_death: Callable[[Death], None] = staticmethod(lambda death: None)
    """Told, on that thread, of a thread of the backend that dies and is in the log. Set by whoever opened it, before
    peers come."""

    @abstractmethod
    def register(self, region: Region) -> None:
        """Make `region` readable by peers and writable by own pulls, until `deregister` or `close`.

        Raises `RegionError` when this memory cannot be served, with what to change.
        """

    @abstractmethod
    def deregister(self, region: Region) -> None:
        """Undo `register`; unknown ones are ignored. It protects nothing: a pull under way may still read."""

    @abstractmethod
    def endpoint(self) -> bytes:
        """What a peer needs to connect, after the regions are registered. Opaque, at most 64 KiB."""

    @abstractmethod
    def connect(self, peer: Peer) -> None:
        """Reach `peer` (blocks). The same incarnation again is cheap; another one replaces the old.

        Raises `PeerGone` or `BackendUnavailable` with the reason (another host, a mismatched version).
        """

    @abstractmethod
    def disconnect(self, peer: Peer) -> None:
        """Forget `peer`. Its pulls must be quiet. Unknown ones are ignored."""

    @abstractmethod
    def submit(self, batch: PullBatch) -> PullHandle:
        """Start a pull. Source and destination ranges are checked against registered regions before a byte moves."""

    @abstractmethod
    def poll(self, handle: PullHandle) -> PullStatus:
        """Advance and report. FAILED leaves the reason in `handle.error`."""

    @abstractmethod
    def settle(self, handle: PullHandle) -> Settled:
        """Stop the pull where that is possible, and say whether anything may still land."""

    @abstractmethod
    def fence(self, peer: Peer) -> tuple[str, ...]:
        """Make every pull from `peer` quiet by breaking the connection; returns the worker ids that this breaks."""

    def serve(self, owner: str, num_readers: int) -> None:  # noqa: B027 - most engines need no driving
        """Told by an owner of regions, by its worker id, how many readers it has right now at least; 0: none.

        For an engine whose source side has to be driven for its peers' reads to move. Returns at once; any thread.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything. Twice is fine."""
