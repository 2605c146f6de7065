"""Owns the forward as all ranks see it, and the scratch copies of layers that other ranks own. Not the owned memory.

It decides when a layer is fetched and what makes a copy stale; `scratch_ring` says where it goes, `broadcast_reader`
moves it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pdlink.errors import IntegrityError, LayoutError, PdlinkError, StateError
from pdlink.layout import CacheLayout, Component, fingerprint
from pdlink.memory.broadcast_reader import BroadcastReader
from pdlink.memory.forward import LayerKey, ReadSpan, digest63, live_pages
from pdlink.memory.forward_state import ForwardState, check_order
from pdlink.memory.lockstep import Step, StepKind
from pdlink.memory.owned_regions import OwnedRegions
from pdlink.memory.scratch import Scratch
from pdlink.memory.token_rows import put_fields


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counts since the pool was made.

    `reads` are calls, of which `scratch_hits` found the layer in scratch and `fetches` moved it; the rest were of
    layers that every rank has. Bytes are counted at the communicator: `nbytes_moved` are live pages and their
    trailers, `nbytes_last_fetch` those of the latest fetch, `nbytes_agreed` the records exchanged at each step.
    """

    reads: int = 0
    scratch_hits: int = 0
    fetches: int = 0
    nbytes_moved: int = 0
    nbytes_last_fetch: int = 0
    nbytes_agreed: int = 0


class RemoteLayers:
    """Reads of split layers, in step with the other ranks. `reader` is None where every layer is local. One thread."""

    def __init__(
        self,
        layout: CacheLayout,
        regions: OwnedRegions,
        reader: BroadcastReader | None,
        num_pages: int,
        scratch_slots: int,
    ) -> None:
        self._layout = layout
        self._regions = regions
        self._reader = reader
        self._num_pages = num_pages
        self._scratch: dict[str, Scratch] = {}
        self._setup_digest = 0
        self._forward: ForwardState | None = None
        self._forward_number = 0
        self._reads = self._hits = self._fetches = self._last_fetch = 0
        # A reader may have served another pool before.
        self._moved_before, self._agreed_before = (reader.nbytes_moved, reader.nbytes_agreed) if reader else (0, 0)
        if reader is not None:
            owners = reader.owners
            remote = owners.remote_components(reader.rank)
            self._scratch = {
                name: Scratch(layout.component(name), num_pages, scratch_slots, reads_remotely=name in remote)
                for name in owners.split_components()
            }
            facts = (num_pages, scratch_slots, owners.digest, fingerprint(layout).items)
            self._setup_digest = digest63(repr(facts).encode())

    @property
    def forward(self) -> ForwardState | None:
        """The forward that has begun and not ended, failed or not."""
        return self._forward

    @property
    def nbytes(self) -> int:
        """Bytes of all scratch buffers."""
        return sum(one.nbytes for one in self._scratch.values())

    @property
    def stats(self) -> PoolStats:
        moved, agreed = (self._reader.nbytes_moved, self._reader.nbytes_agreed) if self._reader else (0, 0)
        return PoolStats(
            self._reads,
            self._hits,
            self._fetches,
            moved - self._moved_before,
            self._last_fetch,
            agreed - self._agreed_before,
        )

    def is_split(self, key: LayerKey) -> bool:
        """Whether ranks other than the owner have to fetch the layer."""
        return self._reader is not None and self._reader.owners.is_split(key)

    def buffers(self, component: str) -> tuple[torch.Tensor, ...]:
        return self._scratch[component].buffers if component in self._scratch else ()

    def begin(self, spans: Sequence[ReadSpan], layer_order: Sequence[LayerKey]) -> None:
        """See `LayerShardedPool.begin_forward`."""
        if self._forward is not None and self._forward.failure is None:
            raise StateError(f"forward {self._forward.number} has not ended; call end_forward first")
        self.drop_forward()
        self._forward_number += 1
        try:
            order = check_order(self._layout, layer_order)
            live = live_pages(self._layout, spans, self._num_pages)
        except PdlinkError:
            # The others wait in the exchange by now, or soon: they hear of it at once rather than after a timeout.
            if self._reader is not None:
                self._reader.announce(Step(StepKind.BEGIN, self._forward_number))
            raise
        self._forward = ForwardState(self._forward_number, live, order)
        self._agree(self._forward, self._forward.begin_step(self._setup_digest))

    def end(self) -> None:
        """See `LayerShardedPool.end_forward`."""
        forward = self._forward
        if forward is None:
            raise StateError("no forward has begun")
        try:
            if forward.failure is not None:
                raise IntegrityError(f"forward {forward.number} failed: {forward.failure}") from forward.failure
            self._agree(forward, forward.end_step())
        finally:
            self.drop_forward()

    def running(self, what: str) -> ForwardState:
        """The forward, if one is running and has not failed."""
        if self._forward is None:
            raise StateError(f"{what}: no forward has begun; call begin_forward with the batch's prefixes first")
        if self._forward.failure is not None:
            raise IntegrityError(
                f"{what}: forward {self._forward.number} has failed: {self._forward.failure}"
            ) from self._forward.failure
        return self._forward

    def read(self, key: LayerKey) -> torch.Tensor:
        """See `LayerShardedPool.read`."""
        component, layer = key
        if not self.is_split(key):
            self._reads += 1
            return self._regions.tensor(key)
        forward = self.running(f"read of {component!r} layer {layer}")
        scratch = self._scratch[component]
        self._reads += 1
        if scratch.ring.is_valid(layer):
            self._hits += 1
        else:
            self._fetch(forward, key, scratch)
        scratch.ring.pin(layer)
        buffer = scratch.buffer_of(layer)
        if key in self._regions or buffer is None:
            return self._regions.tensor(key)
        return buffer

    def wrote(self, about: Component, layer: int, slots: torch.Tensor, fields: Mapping[str, torch.Tensor]) -> None:
        """Rows were written, on all ranks alike: keep scratch right. See `LayerShardedPool.write`."""
        key = (about.name, layer)
        if self._forward is None or not self.is_split(key):
            return
        scratch = self._scratch[about.name]
        history = torch.from_numpy(self._forward.prefix(about.page_group).contains(slots.numpy()))
        changed = bool(history.any())
        if changed:
            scratch.ring.invalidate(layer)
        if key in self._regions:
            return
        if changed:
            slots = slots[~history]
            fields = {name: data[~history] for name, data in fields.items()}
        self._forward.chunk.keep(key, slots, fields)
        buffer = scratch.buffer_of(layer) if scratch.ring.is_valid(layer) else None
        if buffer is not None:
            put_fields(buffer, about, slots, fields)

    def supersede(self, key: LayerKey, slots: torch.Tensor) -> None:
        """The owner has other rows at `slots` now: what scratch and chunk rows hold of them is stale."""
        if self._forward is None or not self.is_split(key):
            return
        self._scratch[key[0]].ring.invalidate(key[1])
        self._forward.change(key, slots.numpy().copy())
        self._forward.chunk.forget(key, slots)

    def drop_forward(self) -> None:
        """Back to between forwards, with nothing in scratch."""
        self._forward = None
        for one in self._scratch.values():
            one.ring.clear()

    def close(self) -> None:
        """Free the scratch buffers; the reader is its owner's to close. Twice is fine."""
        self.drop_forward()
        for one in self._scratch.values():
            one.drop()

    def _fetch(self, forward: ForwardState, key: LayerKey, scratch: Scratch) -> None:
        """Claim a slot and bring the layer's rows into it, together with all other ranks."""
        reader, (component, layer) = self._reader, key
        if reader is None:
            raise LayoutError(f"{component!r} layer {layer} is another rank's and the pool has no reader")
        about = self._layout.component(component)
        scratch.ring.claim(layer)
        forward.sequence += 1
        wanted = forward.wanted(key, about.page_group)
        step = reader.step(StepKind.READ, forward.number, forward.sequence, key, wanted)
        self._agree(forward, step)
        region = self._regions.tensor(key) if key in self._regions else None
        buffer = scratch.buffer_of(layer) if region is None else None
        before = reader.nbytes_moved
        try:
            reader.load(step, about, wanted, region, buffer)
        except PdlinkError as exc:
            self._fail(forward, exc)
            raise
        self._fetches += 1
        self._last_fetch = reader.nbytes_moved - before
        if buffer is not None:
            for slots, fields in forward.chunk.of(key):
                put_fields(buffer, about, slots, fields)
        scratch.ring.fill(layer)

    def _agree(self, forward: ForwardState, step: Step) -> None:
        if self._reader is None:
            return
        try:
            self._reader.agree(step)
        except PdlinkError as exc:
            self._fail(forward, exc)
            raise

    def _fail(self, forward: ForwardState, exc: PdlinkError) -> None:
        forward.failure = exc
        for one in self._scratch.values():
            one.ring.clear()
