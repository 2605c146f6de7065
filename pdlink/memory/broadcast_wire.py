"""Owns the bytes of one broadcast in host memory: gathered by the owner, checked by their trailer, put into scratch.

Who broadcasts what, and when, is decided by the reader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from pdlink.errors import IntegrityError
from pdlink.layout import Component
from pdlink.memory.communicator import Communicator
from pdlink.memory.forward import LayerKey, LivePages
from pdlink.memory.lockstep import RECORD_NBYTES, TRAILER_MAGIC, Step, describe, name_rank, unpack
from pdlink.memory.token_rows import copy_rows, put_pages


class NothingCame(IntegrityError):
    """A broadcast brought something else than what its owner sent."""


class Wire(Protocol):
    """What carries the pages of one layer from its owner to all ranks."""

    @property
    def nbytes_moved(self) -> int:
        """Bytes broadcast so far."""

    @property
    def nbytes_staging(self) -> int:
        """Bytes of the buffer between pages and broadcasts."""

    def begin(self) -> None:
        """A forward begins, on all ranks."""

    def move(
        self,
        step: Step,
        owner: int,
        component: Component,
        live: LivePages,
        region: torch.Tensor | None,
        scratch: torch.Tensor | None,
    ) -> None:
        """Broadcast the rows of `live` from the owner's `region`, and put them into the others' `scratch`.

        Raises `NothingCame`, at once or from `confirm`, and what the communicator raises.
        """

    def land(self, key: LayerKey) -> None:
        """What the caller does from here on comes after the move of that layer."""

    def settle(self) -> None:
        """Changes of owned rows that the caller makes from here on come after all moves."""

    def confirm(self, step: Step, watch: Callable[[], None]) -> None:
        """Return when all moves are over and were right. `watch` is called while that takes long, and may raise."""

    def abandon(self) -> None:
        """Leave moves that may never end; all ranks do so. Nothing is under way on return."""

    def close(self) -> None:
        """Twice is fine."""


class HostWire:
    """A wire over a communicator that moves host memory. `components` are their sorted names."""

    def __init__(self, communicator: Communicator, components: Sequence[str]) -> None:
        self._communicator = communicator
        self._components = components
        self._staging = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes_moved(self) -> int:
        return self._communicator.nbytes_broadcast

    @property
    def nbytes_staging(self) -> int:
        return self._staging.nbytes

    def begin(self) -> None: ...

    def move(
        self,
        step: Step,
        owner: int,
        component: Component,
        live: LivePages,
        region: torch.Tensor | None,
        scratch: torch.Tensor | None,
    ) -> None:
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
        self._communicator.broadcast(wire, owner, describe(step, self._components))
        if scratch is None:
            return
        self._check_trailer(step, trailer, owner)
        full = live.num_full
        put_pages(scratch, page_ids[:full], rows[:full])
        position, row = (torch.from_numpy(one) for one in live.partial_rows())
        copy_rows(component, rows, position, scratch, page_ids[position], row)

    def land(self, key: LayerKey) -> None: ...

    def settle(self) -> None: ...

    def confirm(self, step: Step, watch: Callable[[], None]) -> None: ...

    def abandon(self) -> None: ...

    def close(self) -> None: ...

    def _check_trailer(self, step: Step, trailer: torch.Tensor, owner: int) -> None:
        came = unpack(trailer.numpy().copy().view(np.int64), TRAILER_MAGIC)
        if came == step:
            return
        found = "nothing" if came is None else describe(came, self._components)
        raise NothingCame(
            f"{describe(step, self._components)}: the broadcast of "
            f"{name_rank(owner, self._communicator.global_ranks)} brought {found}; its communicator does not work, and "
            "no row of it was used"
        )

    def _wire(self, nbytes: int) -> torch.Tensor:
        if self._staging.nbytes < nbytes:
            self._staging = torch.empty(nbytes, dtype=torch.uint8)
        return self._staging[:nbytes]
