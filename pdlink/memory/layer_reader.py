"""Owns what the pool asks of a reader, as a protocol: a reader brings layers of other ranks. It implements none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from pdlink.layout import CacheLayout, Component
from pdlink.memory.forward import LayerKey, LivePages
from pdlink.memory.lockstep import Step, StepKind
from pdlink.memory.owned_regions import OwnedRegions
from pdlink.memory.owners import ShardOwners

NO_GRAPHS = (
    "broadcasts are not captured into a graph: one would always send as many bytes as it was captured with, and could "
    "not be replayed once a rank had failed, which ends the communicator that it was captured on; use the peer reader "
    "(pool_reader: peer), or begin, end and read outside of graphs and capture what is between reads"
)


class LayerReader(Protocol):
    """Brings the layers that other ranks of a shard group own. One pool at a time, one thread at a time.

    Every call returns or raises in bounded time. What it raises is `IntegrityError` when ranks differ or bytes are not
    what they should be, `DeadlineExceeded` when a rank does not come, `PeerGone` when one has ended.
    """

    owners: ShardOwners
    is_collective: bool
    """Whether a layer's owner takes part in each fetch of it, so that all ranks must make the same reads."""

    @property
    def rank(self) -> int:
        """This rank inside the shard group."""

    @property
    def nbytes_moved(self) -> int:
        """Bytes of layer reads so far, counted where they are moved."""

    @property
    def nbytes_agreed(self) -> int:
        """Bytes exchanged so far to agree on what is read."""

    @property
    def timeout_s(self) -> float:
        """After which a wait for other ranks ends."""

    def attach(self, layout: CacheLayout, regions: OwnedRegions) -> None:
        """Serve a pool; all ranks do so at once. Raises `StateError` while another pool is served."""

    def detach(self) -> None:
        """The pool is closed; twice is fine."""

    def step(self, kind: StepKind, forward: int, sequence: int, key: LayerKey, live: LivePages) -> Step:
        """The record of a layer read."""

    def begin(self, step: Step, order: Sequence[LayerKey]) -> None:
        """Return when the ranks agree on the forward; `order` says in which order layers will be read, if known."""

    def skip(self, step: Step) -> None:
        """This rank takes no part in the forward; waits for nobody. Raises `StateError` where all must take part."""

    def end(self, step: Step) -> None:
        """The forward is over here."""

    def fail(self, step: Step) -> None:
        """The forward failed here, at `step`: nobody should wait for this rank in it. Does not wait for others."""

    def announce(self, step: Step) -> None:
        """This rank will not make the call `step` that the others are in, or will be. Does not wait for them."""

    def before_write(self) -> None:
        """Return when own layers may get rows that no gather of this forward wants."""

    def before_change(self) -> None:
        """Return when rows of own layers may be changed that gathers may want; all ranks call it alike."""

    def after_change(self) -> None:
        """The change that `before_change` began is made."""

    def fetch(
        self,
        step: Step,
        component: Component,
        live: LivePages,
        region: torch.Tensor | None,
        scratch: torch.Tensor | None,
    ) -> None:
        """Bring the rows of `live` of a layer into `scratch`; only those rows of it are written.

        Tensors are uint8 [num_pages, page_bytes]. The owner, where it takes part, gives its `region` and no scratch.
        """

    def land(self, key: LayerKey) -> None:
        """What the caller does with scratch from here on comes after the fetch of that layer: on a device, a fetch that
        has returned has only been launched."""

    def capturing(self, base: int) -> AbstractContextManager[None]:
        """Within, fetches and `before_write` are captured into a graph. The first epoch of the forward that it makes is
        the int64 at `base` when it is replayed, behind `begin`. Raises `StateError` where fetches need all ranks."""

    def replayed(self, nbytes: int) -> None:
        """A forward has begun whose graph moves so many bytes."""

    def close(self) -> None:
        """Twice is fine."""
