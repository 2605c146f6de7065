"""Owns how a layer gets from its owner to the scratch of the other ranks by broadcast. It keeps no scratch itself.

Each step begins with an exchange of records (see `lockstep`), so the ranks know that they are about to do the same
thing before a byte moves. Then the owner gathers the live pages into one buffer and broadcasts it, with the record
again behind the bytes: a rank that finds another record there, or none, has not received what the owner sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pdlink.errors import IntegrityError, PdlinkError
from pdlink.layout import Component
from pdlink.memory.communicator import DEFAULT_TIMEOUT_S, Communicator, GroupCommunicator
from pdlink.memory.forward import LayerKey, LivePages
from pdlink.memory.lockstep import (
    RECORD_NBYTES,
    TRAILER_MAGIC,
    Step,
    StepKind,
    describe,
    find_divergence,
    name_rank,
    unpack,
)
from pdlink.memory.owners import ShardOwners
from pdlink.memory.token_rows import copy_rows, put_pages


class BroadcastReader:
    """Reads of layers that other ranks of the shard group own. Collective: all ranks make the same calls.

    A call in which the ranks differ raises `IntegrityError` on all of them at once; a rank that makes no call at all
    makes the others raise `DeadlineExceeded` after the communicator's timeout. One thread at a time.
    """

    def __init__(self, owners: ShardOwners, communicator: Communicator) -> None:
        if len(communicator.global_ranks) != owners.num_ranks:
            raise IntegrityError(
                f"the layer owners are for {owners.num_ranks} ranks, the shard group has "
                f"{len(communicator.global_ranks)}: {list(communicator.global_ranks)}"
            )
        self.owners = owners
        self._communicator = communicator
        self._components = sorted({component for component, _ in owners.table})
        self._staging = torch.empty(0, dtype=torch.uint8)

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
    def nbytes_moved(self) -> int:
        """Bytes of layer reads so far, counted at the communicator: live pages and trailers."""
        return self._communicator.nbytes_broadcast

    @property
    def nbytes_agreed(self) -> int:
        """Bytes of record exchanges so far, counted at the communicator."""
        return self._communicator.nbytes_gathered

    @property
    def nbytes_staging(self) -> int:
        """Bytes of the buffer between pages and wire: the largest read so far."""
        return self._staging.nbytes

    def step(self, kind: StepKind, forward: int, sequence: int, key: LayerKey, live: LivePages) -> Step:
        """The record of a layer read."""
        index = self._components.index(key[0])
        return Step(kind, forward, sequence, index, key[1], live.num_pages, live.digest)

    def agree(self, step: Step) -> None:
        """Return when every rank is at `step`; raise `IntegrityError` naming the ranks that are not."""
        what = describe(step, self._components)
        words = self._communicator.gather(torch.from_numpy(step.pack()), what).numpy()
        found = find_divergence([unpack(row) for row in words], self._communicator.global_ranks, self._components)
        if found:
            raise IntegrityError(f"ranks disagree: {found}")

    def announce(self, step: Step) -> None:
        """Tell the others, who are or will be in `agree`, that this rank failed. Does not wait for them."""
        failed = Step(StepKind.FAILED, step.forward, step.sequence, step.component, step.layer)
        self._communicator.announce(torch.from_numpy(failed.pack()))

    def load(
        self,
        step: Step,
        component: Component,
        live: LivePages,
        region: torch.Tensor | None,
        scratch: torch.Tensor | None,
    ) -> None:
        """Move the rows of `live` from the owner's `region` into `scratch`, both uint8 [num_pages, page_bytes].

        The owner gives its region and no scratch, every other rank its scratch and no region; the step has been
        agreed on. Only rows in `live` are written. Raises `IntegrityError` when what came is not what the owner sent.
        """
        if not live.num_pages:
            return
        owner = self.owners.owner((component.name, step.layer))
        nbytes = live.num_pages * component.page_bytes
        wire = self._wire(nbytes + RECORD_NBYTES)
        rows = wire[:nbytes].view(live.num_pages, component.page_bytes)
        trailer = wire[nbytes:]
        page_ids = torch.from_numpy(live.page_ids)
        if region is not None:
            torch.index_select(region, 0, page_ids, out=rows)
            trailer.copy_(torch.from_numpy(step.pack(TRAILER_MAGIC).view(np.uint8)))
        else:
            trailer.zero_()
        what = describe(step, self._components)
        self._communicator.broadcast(wire, owner, what)
        if scratch is None:
            return
        self._check_trailer(step, trailer, what, owner)
        full = live.num_full
        put_pages(scratch, page_ids[:full], rows[:full])
        position, row = (torch.from_numpy(one) for one in live.partial_rows())
        copy_rows(component, rows, position, scratch, page_ids[position], row)

    def close(self) -> None:
        """Leave the group; twice is fine."""
        self._communicator.close()

    def _check_trailer(self, step: Step, trailer: torch.Tensor, what: str, owner: int) -> None:
        came = unpack(trailer.numpy().copy().view(np.int64), TRAILER_MAGIC)
        if came == step:
            return
        found = "nothing" if came is None else describe(came, self._components)
        error: PdlinkError = IntegrityError(
            f"{what}: the broadcast of {name_rank(owner, self._communicator.global_ranks)} brought {found}; its "
            "communicator does not work, and no row of it was used"
        )
        self.announce(step)
        raise error

    def _wire(self, nbytes: int) -> torch.Tensor:
        if self._staging.nbytes < nbytes:
            self._staging = torch.empty(nbytes, dtype=torch.uint8)
        return self._staging[:nbytes]
