"""Owns how a layer gets from its owner to the scratch of the other ranks by broadcast. It keeps no scratch itself.

A forward begins with an exchange of records (see `lockstep`), so the ranks know that they are about to do the same
thing before a byte moves. The owner of a layer gathers its live pages into one buffer and broadcasts it, with the
record of the read behind the bytes: a rank that finds another record there, or none, has not received what the owner
sent.

Without a layer order, each read has an exchange of its own. With one, all ranks know which broadcast comes next, so
reads in that order need none. A rank that is about to make another call says so where the others look while they wait
(`Communicator.post`), and waits to hear what each of them is at: either all leave the order together, and every step
has its exchange from there on, or the forward fails on all of them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch

from pdlink.errors import DeadlineExceeded, IntegrityError, StateError
from pdlink.layout import CacheLayout, Component
from pdlink.memory.broadcast_wire import HostWire, NothingCame, Wire
from pdlink.memory.communicator import DEFAULT_TIMEOUT_S, Communicator, GroupCommunicator
from pdlink.memory.device_wire import DeviceWire
from pdlink.memory.forward import LayerKey, LivePages
from pdlink.memory.layer_reader import NO_GRAPHS
from pdlink.memory.lockstep import Step, StepKind, describe, find_divergence, name_rank, unpack
from pdlink.memory.owned_regions import OwnedRegions
from pdlink.memory.owners import ShardOwners

_POSTED_EVERY_S = 0.002


class BroadcastReader:
    """Reads of layers that other ranks of the shard group own. Implements `LayerReader`; all ranks make the same calls.

    A call in which the ranks differ raises `IntegrityError` on all of them at once; a rank that makes no call at all
    makes the others raise `DeadlineExceeded` after the communicator's timeout. One thread at a time.
    """

    is_collective = True

    def __init__(self, owners: ShardOwners, communicator: Communicator) -> None:
        if len(communicator.global_ranks) != owners.num_ranks:
            raise IntegrityError(
                f"the layer owners are for {owners.num_ranks} ranks, the shard group has "
                f"{len(communicator.global_ranks)}: {list(communicator.global_ranks)}"
            )
        self.owners = owners
        self._communicator = communicator
        self._components = sorted({component for component, _ in owners.table})
        self._wire: Wire = HostWire(communicator, self._components)
        # The layers still to come in the order that all ranks gave; None where each step has an exchange.
        self._order: deque[LayerKey] | None = None
        self._changed = False
        self._num_pools = 0

    @classmethod
    def open(
        cls, owners: ShardOwners, global_ranks: Sequence[int], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> BroadcastReader:
        """A reader on a group of its own, over gloo. `global_ranks` of the shard group, in shard rank order."""
        return cls(owners, GroupCommunicator(global_ranks, timeout_s=timeout_s))

    @property
    def rank(self) -> int:
        """This rank inside the shard group."""
        return self._communicator.rank

    @property
    def timeout_s(self) -> float:
        return self._communicator.timeout_s

    @property
    def nbytes_moved(self) -> int:
        """Bytes of layer reads so far, counted at the communicator: live pages and trailers."""
        return self._wire.nbytes_moved

    @property
    def nbytes_agreed(self) -> int:
        """Bytes of record exchanges so far, counted at the communicator."""
        return self._communicator.nbytes_gathered

    @property
    def nbytes_staging(self) -> int:
        """Bytes of the buffer between pages and wire: the largest read so far."""
        return self._wire.nbytes_staging

    def attach(self, layout: CacheLayout, regions: OwnedRegions) -> None:
        """Count the pool: forwards are numbered in each. What is broadcast is given with each fetch."""
        self._num_pools += 1
        self._wire.close()
        if regions.device is None:
            self._wire = HostWire(self._communicator, self._components)
        else:
            before = self._wire.nbytes_moved
            self._wire = DeviceWire(regions.device, self._communicator, self._components, before)

    def detach(self) -> None:
        self._wire.close()

    def step(self, kind: StepKind, forward: int, sequence: int, key: LayerKey, live: LivePages) -> Step:
        """The record of a layer read."""
        index = self._components.index(key[0])
        return Step(kind, forward, sequence, index, key[1], live.num_pages, live.digest)

    def begin(self, step: Step, order: Sequence[LayerKey]) -> None:
        self._order, self._changed = None, False
        self._communicator.watch = None
        self._agree(step)
        self._wire.begin()
        split = [key for key in order if self.owners.is_split(key)]
        self._order = deque(split) if split else None

    def skip(self, step: Step) -> None:
        raise StateError(
            f"forward {step.forward} cannot be skipped: broadcasts need every rank of the shard group; begin it with "
            "no spans and read what the others read, or use the peer reader"
        )

    def end(self, step: Step) -> None:
        try:
            self._wire.confirm(step, lambda: self._watch(step))
        except NothingCame:
            self.announce(step)
            raise
        if self._order or (self._order is not None and self._changed):
            self._leave_order(step)
            return
        self._agree(step)
        self._order = None

    def fail(self, step: Step) -> None:
        """Others need not be told: what fails in an exchange fails on all ranks, and a broadcast announces it."""
        self._wire.abandon()

    def land(self, key: LayerKey) -> None:
        self._wire.land(key)

    def before_write(self) -> None:
        """Nothing to wait for: what is broadcast has been gathered by the owner itself. Nor below."""

    def before_change(self) -> None:
        # The rows of later broadcasts are no longer those that all agreed on at the begin.
        self._changed = True
        self._wire.settle()

    def after_change(self) -> None: ...

    def _agree(self, step: Step) -> None:
        """Return when every rank is at `step`; raise `IntegrityError` naming the ranks that are not."""
        self._communicator.watch = None if self._order is None else lambda: self._look(step)
        what = describe(step, self._components)
        words = self._communicator.gather(torch.from_numpy(step.pack()), what).numpy()
        found = find_divergence([unpack(row) for row in words], self._communicator.global_ranks, self._components)
        if found:
            raise IntegrityError(f"ranks disagree: {found}")

    def announce(self, step: Step) -> None:
        failed = Step(StepKind.FAILED, step.forward, step.sequence, step.component, step.layer)
        if self._order is not None and step.kind is not StepKind.BEGIN:
            self._communicator.post(self._topic(step), failed.pack().tobytes())
            self._communicator.abandon()
            return
        self._communicator.announce(torch.from_numpy(failed.pack()))

    def fetch(
        self,
        step: Step,
        component: Component,
        live: LivePages,
        region: torch.Tensor | None,
        scratch: torch.Tensor | None,
    ) -> None:
        """Move the rows of `live` from the owner's `region` into `scratch`, both uint8 [num_pages, page_bytes].

        The owner gives its region and no scratch, every other rank its scratch and no region; the step is
        agreed on first. Only rows in `live` are written. Raises `IntegrityError` when what came is not what the owner
        sent.
        """
        if self._order and self._order[0] == (component.name, step.layer) and not self._changed:
            self._order.popleft()
            self._communicator.watch = lambda: self._look(step)
        elif self._order is not None:
            self._leave_order(step)
        else:
            self._agree(step)
        if not live.num_pages:
            return
        owner = self.owners.owner((component.name, step.layer))
        try:
            self._wire.move(step, owner, component, live, region, scratch)
        except NothingCame:
            self.announce(step)
            raise

    def capturing(self, base: int) -> AbstractContextManager[None]:
        raise StateError(NO_GRAPHS)

    def replayed(self, nbytes: int) -> None:
        raise StateError(NO_GRAPHS)

    def close(self) -> None:
        """Leave the group; twice is fine."""
        self._wire.close()
        self._communicator.close()

    def _leave_order(self, step: Step) -> None:
        """Go on without the order, if all ranks leave it for the same step; else fail on all of them."""
        self._settle(step)
        self._order = self._communicator.watch = None

    def _topic(self, step: Step) -> str:
        return f"{self._num_pools}/{step.forward}"

    def _watch(self, step: Step) -> None:
        """While a device is waited for: no rank has gone another way, nor has its process."""
        self._communicator.check_present(describe(step, self._components))
        if self._order is not None:
            self._look(step)

    def _look(self, step: Step) -> None:
        """Raise if a rank has gone another way at `step` or before; one that did so later waits for this one."""
        said = [unpack(np.frombuffer(one, np.int64)) for one in self._communicator.posted(self._topic(step)) if one]
        if any(one is not None and _position(one) <= _position(step) for one in said):
            self._settle(step)
            self._communicator.abandon()
            raise IntegrityError(
                f"{describe(step, self._components)}: another rank gave up an order of reads that it had kept to"
            )

    def _settle(self, step: Step) -> None:
        """Say that this rank is at `step` and hear where the others are. Raises unless all are there."""
        topic = self._topic(step)
        self._communicator.post(topic, step.pack().tobytes())
        until = time.monotonic() + self._communicator.timeout_s
        while None in (said := self._communicator.posted(topic)) and time.monotonic() < until:
            time.sleep(_POSTED_EVERY_S)
        ranks = self._communicator.global_ranks
        heard = [unpack(np.frombuffer(one, np.int64)) for one in said if one is not None]
        if None in said:
            self._communicator.abandon()
            silent = ", ".join(name_rank(rank, ranks) for rank, one in enumerate(said) if one is None)
            raise DeadlineExceeded(
                f"{describe(step, self._components)}, which is not the next of the layer order: waited "
                f"{self._communicator.timeout_s:g} s for {silent}; all ranks must make the same calls"
            )
        found = find_divergence(heard, ranks, self._components)
        if found:
            self._communicator.abandon()
            raise IntegrityError(f"ranks disagree: {found}")


def _position(step: Step) -> int:
    """Which call of the forward a step is: layer reads count from 1, the end comes after the last of them."""
    return step.sequence + (step.kind is StepKind.END)
