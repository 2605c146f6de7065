"""Owns the layer-sharded pool: owned layers in memory, reads of the others through scratch, and the rules of both.

It decides what is fetched when, and what a write makes stale. How bytes come from another rank is the reader's
business (`broadcast_reader`), which slot they go to the ring's (`scratch_ring`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pdlink.errors import IntegrityError, LayoutError, PdlinkError, StateError
from pdlink.layout import CacheLayout, Component, OwnedLayers, Region, fingerprint
from pdlink.memory.broadcast_reader import BroadcastReader
from pdlink.memory.forward import LayerKey, ReadSpan, check_pages, digest63, live_pages
from pdlink.memory.forward_state import ForwardState, check_order
from pdlink.memory.lockstep import Step, StepKind
from pdlink.memory.owned_regions import OwnedRegions
from pdlink.memory.scratch import Scratch
from pdlink.memory.token_rows import check_rows, check_slots, move_rows, read_rows, split_slots, write_rows

__all__ = ["LayerShardedPool", "PoolStats", "ReadSpan"]


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counts since the pool was made.

    `reads` are calls, of which `scratch_hits` found the layer in scratch and `fetches` moved it. Bytes are counted at
    the communicator: `nbytes_moved` are live pages and their trailers, `nbytes_last_fetch` those of the latest
    fetch, `nbytes_agreed` the records exchanged at each step.
    """

    reads: int = 0
    scratch_hits: int = 0
    fetches: int = 0
    nbytes_moved: int = 0
    nbytes_last_fetch: int = 0
    nbytes_agreed: int = 0


class LayerShardedPool:
    """A paged cache pool of one rank that holds owned layers only. Byte tensors are uint8 [num_pages, page_bytes].

    Within a shard group page ids mean the same on all ranks, and every rank makes the same `begin_forward`, `read`,
    `read_compacted`, `rows`, `write`, `move`, `restore` and `end_forward` calls in the same order, owners included.
    Ranks that differ get `IntegrityError` or `DeadlineExceeded` in bounded time, and the forward is over: after
    `end_forward`, which raises the failure again, the next one may begin, unless the group itself broke.

    Threads: one thread calls; `regions()`, `stats` and the sizes may be read from any. Memory: owned memory is shared
    with peers that pull from it, and lives until `close` and its last tensor. A tensor from `read` of another rank's
    layer is scratch: valid until `scratch_slots` other layers of the component have been read, and at the latest until
    `end_forward`; nobody but the pool writes it.
    """

    def __init__(
        self,
        layout: CacheLayout,
        owned: OwnedLayers,
        num_pages: int,
        *,
        reader: BroadcastReader | None = None,
        scratch_slots: int = 2,
    ) -> None:
        """Allocate `num_pages` pages for each owned layer, and `scratch_slots` layers of scratch for each component of
        which other ranks own some. `reader` is None where nobody else owns anything; its owner closes it.

        Raises `LayoutError` when `owned` is not what the reader's owner table says, and `BackendUnavailable` when
        shared memory runs out.
        """
        if num_pages < 1:
            raise LayoutError(f"a pool needs num_pages of at least 1, got {num_pages}")
        self.layout = layout
        self.owned: OwnedLayers = {name: tuple(layers) for name, layers in owned.items()}
        self.num_pages = num_pages
        self._reader = reader
        self._scratch: dict[str, Scratch] = {}
        self._setup_digest = 0
        if reader is not None:
            _check_owned(self.owned, reader)
            remote = reader.owners.remote_components(reader.rank)
            split = {name for (name, _), _ in reader.owners.table.items()}
            self._scratch = {
                name: Scratch(layout.component(name), num_pages, scratch_slots, reads_remotely=name in remote)
                for name in sorted(split)
            }
            facts = (num_pages, scratch_slots, reader.owners.digest, fingerprint(layout).items)
            self._setup_digest = digest63(repr(facts).encode())
        self._regions = OwnedRegions(layout, self.owned, num_pages)
        self._forward: ForwardState | None = None
        self._forward_number = 0
        self._reads = self._hits = self._fetches = self._last_fetch = 0

    @property
    def nbytes_owned(self) -> int:
        """Bytes of shared memory taken for owned layers."""
        return self._regions.nbytes

    @property
    def nbytes_scratch(self) -> int:
        """Bytes of the scratch buffers."""
        return sum(one.nbytes for one in self._scratch.values())

    @property
    def nbytes_chunk_rows(self) -> int:
        """Bytes kept for rows that this forward wrote to layers of other ranks; 0 between forwards."""
        return 0 if self._forward is None else self._forward.chunk.nbytes

    @property
    def stats(self) -> PoolStats:
        moved = (self._reader.nbytes_moved, self._reader.nbytes_agreed) if self._reader else (0, 0)
        return PoolStats(self._reads, self._hits, self._fetches, moved[0], self._last_fetch, moved[1])

    def regions(self) -> tuple[Region, ...]:
        """The owned regions, for registration with a transport; a rank that owns nothing has none."""
        return self._regions.regions()

    def region_tensor(self, component: str, layer: int) -> torch.Tensor:
        """The owned memory of a layer, in place. Raises `LayoutError` for a layer that this rank does not own."""
        return self._regions.tensor(self._key(component, layer))

    def scratch_buffers(self, component: str) -> tuple[torch.Tensor, ...]:
        """The scratch slots of a component, for tests and fault injection; empty where nothing is read remotely."""
        self.layout.component(component)
        return self._scratch[component].buffers if component in self._scratch else ()

    def begin_forward(self, spans: Sequence[ReadSpan], layer_order: Sequence[LayerKey] | None = None) -> None:
        """Say which prefix tokens the batch reads, and in which order its layers will be read, if that is known.

        Collective: one record of forward number, page ids, counts and layer order is compared across the shard group.
        Raises `LayoutError` for spans that cannot be, `StateError` inside a forward, `IntegrityError` when ranks
        disagree, `DeadlineExceeded` when one does not come.
        """
        if self._forward is not None and self._forward.failure is None:
            raise StateError(f"forward {self._forward.number} has not ended; call end_forward first")
        self._drop_forward()
        self._forward_number += 1
        try:
            order = check_order(self.layout, layer_order or ())
            live = live_pages(self.layout, spans, self.num_pages)
        except PdlinkError:
            if self._reader is not None:
                self._reader.announce(Step(StepKind.BEGIN, self._forward_number))
            raise
        self._forward = ForwardState(self._forward_number, live, order)
        self._agree(self._forward, self._forward.begin_step(self._setup_digest))

    def end_forward(self) -> None:
        """End the forward; scratch holds nothing afterwards. Collective.

        Raises the failure of this forward if it had one, else `IntegrityError` when the ranks did not read alike.
        """
        forward = self._forward
        if forward is None:
            raise StateError("no forward has begun")
        try:
            if forward.failure is not None:
                raise IntegrityError(f"forward {forward.number} failed: {forward.failure}") from forward.failure
            self._agree(forward, forward.end_step())
        finally:
            self._drop_forward()

    def read(self, component: str, layer: int) -> torch.Tensor:
        """A layer with every page at its position: the owned region itself, or scratch.

        In scratch only these rows are valid: the prefix of the forward's spans, rows that this rank has written in
        this forward, and rows moved or restored in it. Everything else holds old bytes. Collective unless every rank
        has the layer. Raises `LayoutError`, `StateError` outside a forward, `IntegrityError`, `DeadlineExceeded`.
        """
        key = self._key(component, layer)
        if not self._is_split(key):
            self._reads += 1
            return self._regions.tensor(key)
        forward = self._running(f"read of {component!r} layer {layer}")
        scratch = self._scratch[component]
        self._reads += 1
        if scratch.ring.is_valid(layer):
            self._hits += 1
        else:
            self._fetch(forward, key, scratch)
        scratch.ring.pin(layer)
        if key in self._regions:
            return self._regions.tensor(key)
        buffer = scratch.buffer_of(layer)
        assert buffer is not None, "a remote layer has a scratch buffer"
        return buffer

    def read_compacted(self, component: str, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The live pages of a layer, uint8 [num_live_pages, page_bytes], and where each page went.

        The second is int64 [num_pages]: position of a page id in the first, -1 for pages that are not live. Both are
        copies: later writes do not show in them. Rows as in `read`, which this calls.
        """
        whole = self.read(component, layer)
        forward = self._running(f"compacted read of {component!r} layer {layer}")
        live = forward.prefix(self.layout.component(component).page_group)
        page_ids = torch.from_numpy(live.page_ids)
        remap = torch.full((self.num_pages,), -1, dtype=torch.int64)
        remap[page_ids] = torch.arange(live.num_pages)
        return whole.index_select(0, page_ids), remap

    def rows(self, component: str, layer: int, field: str, slots: torch.Tensor) -> torch.Tensor:
        """The bytes of `field` at `slots` (int64 [n], page * page_size + row): uint8 [n, token_bytes], a copy.

        Inside a forward this is a `read` (and as collective); outside, only owned layers can be asked for.
        """
        about = self.layout.component(component)
        check_slots(slots, about, self.num_pages)
        whole = self.region_tensor(component, layer) if self._forward is None else self.read(component, layer)
        return read_rows(whole, about, about.field(field), *split_slots(slots, about.page_size))

    def write(self, component: str, layer: int, slots: torch.Tensor, fields: Mapping[str, torch.Tensor]) -> None:
        """Write token rows: `fields` has uint8 [n, token_bytes] for each field written, `slots` is int64 [n].

        All ranks call it alike. The owner writes its region. Another rank keeps rows of the current chunk for this
        forward and puts them into scratch, now or when the layer comes: they never come from the owner. Rows of the
        prefix are changed history, so scratch of that layer is invalid from then on. Outside a forward only the owner
        does anything. The caller may reuse `fields` at once. Raises `LayoutError`.
        """
        key = self._key(component, layer)
        about = self.layout.component(component)
        check_slots(slots, about, self.num_pages)
        for name, data in fields.items():
            check_rows(about, about.field(name), data, len(slots))
        if key in self._regions:
            self._put(about, self._regions.tensor(key), slots, fields)
        forward = self._forward
        if forward is None or not self._is_split(key):
            return
        history = torch.from_numpy(forward.prefix(about.page_group).contains(slots.numpy()))
        if bool(history.any()):
            self._scratch[component].ring.invalidate(layer)
        if key in self._regions:
            return
        if bool(history.any()):
            slots = slots[~history]
            fields = {name: data[~history] for name, data in fields.items()}
        forward.chunk.keep(key, slots, fields)
        if self._scratch[component].ring.is_valid(layer):
            buffer = self._scratch[component].buffer_of(layer)
            assert buffer is not None, "a remote layer has a scratch buffer"
            self._put(about, buffer, slots, fields)

    def move(self, component: str | None, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
        """Move token rows of every layer of `component` (None: of all components), field by field.

        All sources are read before a target is written, so the sets may overlap; targets are distinct. All ranks
        call it alike: owners move, and scratch of the touched layers is invalid on all. Raises `LayoutError`.
        """
        if component is None and len(self.layout.page_groups) > 1:
            raise LayoutError("slots belong to one page group and the layout has several; name the component to move")
        names = [one.name for one in self.layout.components] if component is None else [component]
        for about in [self.layout.component(name) for name in names]:
            check_slots(source_slots, about, self.num_pages)
            check_slots(target_slots, about, self.num_pages)
            if len(source_slots) != len(target_slots) or len(torch.unique(target_slots)) != len(target_slots):
                raise LayoutError(
                    f"a move needs as many sources as distinct targets, got {len(source_slots)} and "
                    f"{len(torch.unique(target_slots))} distinct of {len(target_slots)}"
                )
        for about in [self.layout.component(name) for name in names]:
            for layer in about.layers:
                if (about.name, layer) in self._regions:
                    move_rows(self._regions.tensor((about.name, layer)), about, source_slots, target_slots)
                self._supersede((about.name, layer), target_slots)

    def backup(self, component: str, layer: int, pages: Sequence[int]) -> torch.Tensor:
        """A copy of pages of an owned layer, uint8 [len(pages), page_bytes]. Raises `LayoutError` when not owned."""
        region = self.region_tensor(component, layer)
        return region.index_select(0, self._page_ids(pages))

    def restore(self, component: str, layer: int, pages: Sequence[int], data: torch.Tensor | None) -> None:
        """Put back what `backup` gave. All ranks call it alike; those that do not own the layer pass None.

        Scratch of the layer is invalid on all ranks from then on. Raises `LayoutError`.
        """
        key = self._key(component, layer)
        page_ids = self._page_ids(pages)
        about = self.layout.component(component)
        if (data is not None) != (key in self._regions):
            raise LayoutError(f"restore of {component!r} layer {layer}: its owner gives data, other ranks give None")
        if data is not None:
            if data.dtype != torch.uint8 or tuple(data.shape) != (len(page_ids), about.page_bytes):
                raise LayoutError(
                    f"restore of {component!r} takes uint8 [{len(page_ids)}, {about.page_bytes}], got {data.dtype} "
                    f"{list(data.shape)}"
                )
            self._regions.tensor(key).index_copy_(0, page_ids, data)
        rows = torch.arange(about.page_size, dtype=torch.int64)
        self._supersede(key, (page_ids[:, None] * about.page_size + rows).reshape(-1))

    def close(self) -> None:
        """Give owned memory and scratch back; tensors that are still held keep theirs. Twice is fine."""
        self._drop_forward()
        for one in self._scratch.values():
            one.drop()
        self._regions.close()

    def _key(self, component: str, layer: int) -> LayerKey:
        if layer not in self.layout.component(component).layers:
            raise LayoutError(f"component {component!r} has no layer {layer}")
        return component, layer

    def _page_ids(self, pages: Sequence[int]) -> torch.Tensor:
        page_ids = torch.as_tensor(pages, dtype=torch.int64).reshape(-1)
        check_pages(page_ids.numpy(), self.num_pages)
        return page_ids

    def _is_split(self, key: LayerKey) -> bool:
        return self._reader is not None and self._reader.owners.is_split(key)

    def _running(self, what: str) -> ForwardState:
        if self._forward is None:
            raise StateError(f"{what}: no forward has begun; call begin_forward with the batch's prefixes first")
        if self._forward.failure is not None:
            raise IntegrityError(
                f"{what}: forward {self._forward.number} has failed: {self._forward.failure}"
            ) from self._forward.failure
        return self._forward

    def _fetch(self, forward: ForwardState, key: LayerKey, scratch: Scratch) -> None:
        """Claim a slot and bring the layer's rows into it, together with all other ranks."""
        reader, (component, layer) = self._reader, key
        assert reader is not None, "a split layer has a reader"
        about = self.layout.component(component)
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
                self._put(about, buffer, slots, fields)
        scratch.ring.fill(layer)

    def _agree(self, forward: ForwardState, step: Step) -> None:
        if self._reader is None:
            return
        try:
            self._reader.agree(step)
        except PdlinkError as exc:
            self._fail(forward, exc)
            raise

    def _supersede(self, key: LayerKey, slots: torch.Tensor) -> None:
        """The owner has other rows at `slots` now: what scratch and chunk rows hold of them is stale."""
        if self._forward is None or not self._is_split(key):
            return
        self._scratch[key[0]].ring.invalidate(key[1])
        self._forward.change(key, slots.numpy().copy())
        self._forward.chunk.forget(key, slots)

    def _fail(self, forward: ForwardState, exc: PdlinkError) -> None:
        forward.failure = exc
        for one in self._scratch.values():
            one.ring.clear()

    def _drop_forward(self) -> None:
        self._forward = None
        for one in self._scratch.values():
            one.ring.clear()

    @staticmethod
    def _put(about: Component, pages: torch.Tensor, slots: torch.Tensor, fields: Mapping[str, torch.Tensor]) -> None:
        where = split_slots(slots, about.page_size)
        for name, data in fields.items():
            write_rows(pages, about, about.field(name), *where, data)


def _check_owned(owned: OwnedLayers, reader: BroadcastReader) -> None:
    theirs = reader.owners.of_rank(reader.rank)
    for name in sorted({*owned, *theirs}):
        if tuple(sorted(owned.get(name, ()))) != theirs.get(name, ()):
            raise LayoutError(
                f"shard rank {reader.rank} is to own {name!r} layers {list(owned.get(name, ()))}, the reader's table "
                f"says {list(theirs.get(name, ()))}"
            )
