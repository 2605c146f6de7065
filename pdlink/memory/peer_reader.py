"""Owns when a rank may gather a layer straight from its owner's memory, and when an owner may write. It moves nothing.

Nothing here is collective but the one exchange at the begin of a forward, and the meeting when a pool is made: ranks
gather what they need, in any order, and wait for nobody but the owner. The order in time is kept by epochs (`epochs`)
on boards that all ranks map (`peer_board`, `device_boards`); bytes are moved by `peer_regions` and `device_regions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from pdlink.errors import IntegrityError, StateError
from pdlink.layout import CacheLayout, Component
from pdlink.memory.communicator import DEFAULT_TIMEOUT_S, Communicator, GroupCommunicator
from pdlink.memory.device_boards import DeviceBoards
from pdlink.memory.epochs import EpochCursor, begin_of, end_of
from pdlink.memory.forward import LayerKey, LivePages
from pdlink.memory.lockstep import Step, StepKind, describe, excuse, find_divergence
from pdlink.memory.owned_regions import OwnedRegions
from pdlink.memory.owners import ShardOwners
from pdlink.memory.peer_board import NBYTES_POSTED
from pdlink.memory.peer_links import Boards, Layers, PeerLinks


class PeerReader:
    """Reads of layers that other ranks of one host own, from their memory. Implements `LayerReader`. On devices no
    wait below is the host's: it is made in a lane, and a wait in vain raises at the end of the forward.

    A rank may skip layers, read them in an order of its own, or have an empty batch: the others do not notice. Only
    what the pool asks for must be made alike on all ranks: moves, restores, and writes to prefix rows. A wait ends
    after `timeout_s` and names the rank that it was for.
    """

    is_collective = False

    def __init__(
        self, owners: ShardOwners, communicator: Communicator, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        if len(communicator.global_ranks) != owners.num_ranks:
            raise IntegrityError(
                f"the layer owners are for {owners.num_ranks} ranks, the shard group has "
                f"{len(communicator.global_ranks)}: {list(communicator.global_ranks)}"
            )
        self.owners = owners
        self._timeout_s = timeout_s
        self._communicator = communicator
        self._components = sorted({component for component, _ in owners.table})
        self._cursor = EpochCursor()
        self._changes_before = 0
        self._failed = False
        self._links: PeerLinks | None = None
        self._captured: DeviceBoards | None = None
        self._nbytes_moved = 0
        self._nbytes_posted = 0

    @classmethod
    def open(
        cls, owners: ShardOwners, global_ranks: Sequence[int], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> PeerReader:
        """A reader whose ranks meet over a gloo group of its own. `global_ranks` in shard rank order."""
        return cls(owners, GroupCommunicator(global_ranks, timeout_s=timeout_s), timeout_s=timeout_s)

    @property
    def rank(self) -> int:
        return self._communicator.rank

    @property
    def timeout_s(self) -> float:
        return self._timeout_s

    @property
    def nbytes_moved(self) -> int:
        """Bytes that this rank has copied from other ranks' layers."""
        return self._nbytes_moved

    @property
    def nbytes_agreed(self) -> int:
        """Bytes of records that this rank has posted, and of the meetings when pools were made."""
        return self._nbytes_posted + self._communicator.nbytes_gathered

    @property
    def nbytes_staging(self) -> int:
        """None: rows go straight into scratch."""
        return 0

    def attach(self, layout: CacheLayout, regions: OwnedRegions) -> None:
        """Show the own layers to the others, and find theirs. Collective; no other call uses the communicator."""
        if self._links is not None:
            raise StateError("this reader serves a pool already; close that pool, or open another reader")
        self._links = PeerLinks(self._communicator, self.owners.table, layout, regions, self._timeout_s)
        self._cursor = EpochCursor()
        self._changes_before, self._failed = 0, False

    def detach(self) -> None:
        if self._links is not None:
            self._links.close()
        self._links = None

    def step(self, kind: StepKind, forward: int, sequence: int, key: LayerKey, live: LivePages) -> Step:
        index = self._components.index(key[0])
        return Step(kind, forward, sequence, index, key[1], live.num_pages, live.digest)

    def begin(self, step: Step, order: Sequence[LayerKey]) -> None:
        """Show that all rows of earlier forwards are written and read, and compare what the ranks are about to read.

        Raises `IntegrityError` when they differ, but for ranks that skip the forward or have nothing to read in it.
        """
        del order
        boards = self._usable()
        self._layers.begin()
        self._failed = False
        epoch = self._cursor.begin(step.forward)
        boards.advance_read(epoch - 1)
        boards.advance_written(epoch)
        self._post(replace(step, changes=self._changes_before))
        records = boards.records(step.forward, describe(step, self._components))
        found = find_divergence(excuse(records), boards.global_ranks, self._components)
        if found:
            raise IntegrityError(f"ranks disagree: {found}")

    def skip(self, step: Step) -> None:
        boards = self._usable()
        self._finish(step.forward)
        self._changes_before = -1
        self._post(replace(step, changes=-1))
        boards.advance_written(self._cursor.epoch)

    def end(self, step: Step) -> None:
        boards = self._usable()
        self._changes_before = -1 if self._failed else self._cursor.num_changes
        self._finish(step.forward)
        boards.confirm(step.forward, describe(step, self._components))

    def fail(self, step: Step) -> None:
        if self._links is not None:
            self._failed = True
            self._links.boards.fail(step.forward)
            # What failed has stopped gathering: owners need not wait for it.
            self._links.boards.advance_read(end_of(step.forward))

    def announce(self, step: Step) -> None:
        boards = self._usable()
        self._failed = True
        self._changes_before = -1
        boards.fail(step.forward)
        self._post(replace(step, kind=StepKind.FAILED))
        self._finish(step.forward)

    def before_write(self) -> None:
        boards = self._usable()
        boards.wait_read(self._cursor.before_writes, self._cursor.forward, "a write")

    def before_change(self) -> None:
        boards, cursor = self._usable(), self._cursor
        boards.advance_read(cursor.epoch)
        boards.wait_read(cursor.epoch, cursor.forward, f"a change of rows after forward {cursor.forward} had begun")

    def after_change(self) -> None:
        boards, cursor = self._usable(), self._cursor
        if cursor.epoch != end_of(cursor.forward):
            boards.advance_written(cursor.change(cursor.forward))

    def fetch(
        self,
        step: Step,
        component: Component,
        live: LivePages,
        region: torch.Tensor | None,
        scratch: torch.Tensor | None,
    ) -> None:
        """Gather from the owner's memory, once the owner has written what this forward may read."""
        boards, layers = self._usable(), self._layers
        if scratch is None or region is not None:
            raise StateError(f"{describe(step, self._components)}: the layer is this rank's own")
        if not live.num_pages:
            return
        owner = self.owners.owner((component.name, step.layer))
        boards.wait_written(owner, self._cursor.epoch, step.forward, lambda: describe(step, self._components))
        nbytes = layers.gather(component, step.layer, live, scratch)
        if self._captured is None:
            self._nbytes_moved += nbytes

    def land(self, key: LayerKey) -> None:
        self._layers.land(key)

    @contextmanager
    def capturing(self, base: int) -> Iterator[None]:
        """A captured forward is forward 0 here; on the device the first epoch of the one that is made is added."""
        boards, cursor = self._served().boards, self._cursor
        if not isinstance(boards, DeviceBoards):
            raise StateError("reads of host memory are not captured into graphs")
        self._layers.begin()
        self._captured, self._cursor = boards.capturing(base), EpochCursor(begin_of(0))
        try:
            yield
        finally:
            self._captured, self._cursor = None, cursor

    def replayed(self, nbytes: int) -> None:
        self._nbytes_moved += nbytes

    def close(self) -> None:
        self.detach()
        self._communicator.close()

    def _finish(self, forward: int) -> None:
        boards, epoch = self._usable(), self._cursor.end(forward)
        boards.advance_read(epoch)
        boards.advance_written(epoch)

    def _post(self, step: Step) -> None:
        self._usable().post(step)
        self._nbytes_posted += NBYTES_POSTED

    def _usable(self) -> Boards:
        return self._captured or self._served().boards

    @property
    def _layers(self) -> Layers:
        return self._served().layers

    def _served(self) -> PeerLinks:
        if self._links is None:
            raise StateError("the reader serves no pool: its pool is closed, or was never made")
        return self._links
