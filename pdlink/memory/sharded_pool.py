"""Owns the layer-sharded pool: owned layers in memory, and one face for reads and writes of all of them.

How layers of other ranks are fetched, and what makes a copy stale, is `remote_layers`; where a token's bytes lie in a
page is `token_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from pdlink.errors import LayoutError
from pdlink.layout import CacheLayout, Component, OwnedLayers, Region
from pdlink.memory.captured_forward import CapturedForward, check_captured
from pdlink.memory.forward import LayerKey, ReadSpan, check_pages
from pdlink.memory.layer_reader import LayerReader
from pdlink.memory.owned_regions import OwnedRegions
from pdlink.memory.pool_device import PoolDevice
from pdlink.memory.pool_stats import PoolStats
from pdlink.memory.remote_layers import RemoteLayers
from pdlink.memory.slot_looks import SlotLooks, Slots
from pdlink.memory.token_rows import check_rows, move_rows, put_fields, read_rows, split_slots

__all__ = ["LayerShardedPool", "PoolStats", "ReadSpan"]


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
        reader: LayerReader | None = None,
        scratch_slots: int = 2,
        prefetch: bool = False,
        device: PoolDevice | None = None,
    ) -> None:
        """Allocate `num_pages` pages for each owned layer, and `scratch_slots` layers of scratch for each component of
        which other ranks own some. `reader` is None where nobody else owns anything; its owner closes it.

        With `prefetch`, a thread brings the next layers of the order that `begin_forward` was given while this one is
        used, one less than there are scratch slots. A tensor of scratch is then valid only until the next layer of its
        component is read. All ranks of a shard group set it alike.

        On a `device`, which its owner closes after the pool, all of this lies in its memory. Reads and writes are then
        launched, not made, when they return: what the caller launches on its current stream comes after them, and no
        call waits for the device but `end_forward`, which raises what went wrong on it, and looks at slots that lie on
        it. Until then rows that could not be brought are 0xFF. Tokens' rows may be given on the host or the device; a
        tensor of slots on the device is not changed in place while a forward runs, and is handed in for every layer.

        Raises `LayoutError` when `owned` is not what the reader's owner table says, and `BackendUnavailable` when
        shared memory runs out.
        """
        if num_pages < 1:
            raise LayoutError(f"a pool needs num_pages of at least 1, got {num_pages}")
        self.layout = layout
        self.owned: OwnedLayers = {name: tuple(layers) for name, layers in owned.items()}
        self.num_pages = num_pages
        if reader is not None:
            reader.owners.check_owned(reader.rank, self.owned)
        self._regions = OwnedRegions(layout, self.owned, num_pages, device)
        self.device = None if device is None else device.torch_device
        self._slots = SlotLooks(self.device)
        try:
            self._remote = RemoteLayers(layout, self._regions, reader, num_pages, scratch_slots, prefetch=prefetch)
        except BaseException:
            self._regions.close()
            raise

    @property
    def nbytes_owned(self) -> int:
        """Bytes of shared memory taken for owned layers."""
        return self._regions.nbytes

    @property
    def nbytes_scratch(self) -> int:
        """Bytes of the scratch buffers."""
        return self._remote.fetches.nbytes

    @property
    def nbytes_chunk_rows(self) -> int:
        """Bytes kept for rows that this forward wrote to layers of other ranks; 0 between forwards."""
        return self._remote.forward.chunk.nbytes if self._remote.forward else 0

    @property
    def stats(self) -> PoolStats:
        return self._remote.stats

    def regions(self) -> tuple[Region, ...]:
        """The owned regions, for registration with a transport; a rank that owns nothing has none."""
        return self._regions.regions()

    def region_tensor(self, component: str, layer: int) -> torch.Tensor:
        """The owned memory of a layer, in place. Raises `LayoutError` for a layer that this rank does not own."""
        return self._regions.tensor(self._key(component, layer))

    def scratch_buffers(self, component: str) -> tuple[torch.Tensor, ...]:
        """The scratch slots of a component, for tests and fault injection; empty where nothing is read remotely."""
        self.layout.component(component)
        return self._remote.fetches.buffers(component)

    def begin_forward(
        self,
        spans: Sequence[ReadSpan],
        layer_order: Sequence[LayerKey] | None = None,
        *,
        replay: CapturedForward | None = None,
    ) -> None:
        """Say which prefix tokens the batch reads, and in which order its layers will be read, if that is known.

        Collective: one record of forward number, page ids, counts and layer order is compared across the shard group.
        Raises `LayoutError` for spans that cannot be, `StateError` inside a forward, `IntegrityError` when ranks
        disagree, `DeadlineExceeded` when one does not come.

        With `replay` the forward is made by the replay, once, of the graph that was captured for it, on the caller's
        current stream; it has the layer order that it was prepared with. Other ranks may replay theirs, or not.
        """
        if replay is not None and layer_order is not None:
            raise LayoutError("a replay has the layer order that its capture was prepared with; give none")
        self._slots.clear()
        self._remote.begin(spans, layer_order or (), replay)

    def end_forward(self) -> None:
        """End the forward; scratch holds nothing afterwards. Collective.

        Raises the failure of this forward if it had one, else `IntegrityError` when the ranks did not read alike.
        """
        self._slots.clear()
        self._remote.end()

    def prepare_capture(self, layer_order: Sequence[LayerKey] | None = None) -> CapturedForward:
        """What one CUDA graph of a forward needs of the pool: device memory that is filled before each replay.

            captured = pool.prepare_capture(layer_order)
            with torch.cuda.graph(graph), pool.capturing(captured):
                model()  # its reads and writes of the pool
            ...
            pool.begin_forward(spans, replay=captured)
            graph.replay()
            pool.end_forward()

        `layer_order` is as in `begin_forward`. A capture is this rank's alone: no other has to make one. Called outside
        of captures. Raises `StateError` with a reader whose reads need all ranks, and for a pool in host memory.
        """
        return self._remote.prepare_capture(layer_order or ())

    def capturing(self, captured: CapturedForward) -> AbstractContextManager[None]:
        """Within, reads and writes of layers are captured as they will be made at each replay: with the pages of that
        forward, which may be none, and after the waits for other ranks that it needs.

        Used inside the capture of a graph and between forwards. Nothing is moved; `read` gives the tensor that will
        hold the layer at that point of a replay. Slots and rows that are written lie on the pool's device, in tensors
        that the engine refills before a replay; nobody looks at slots, so it is the engine's to have them inside the
        pool and outside of the prefixes that `begin_forward` is given. Rows of the chunk may share a page with a
        prefix. Moves, restores and compacted reads are refused.

        Memory: a replay reads and writes owned regions and scratch, and memory of other ranks; graphs are not replayed
        outside of a forward, nor after `close`. Raises `StateError` outside of a capture, inside a forward, and for
        tensors on the host.
        """
        return self._remote.capturing(captured)

    def skip_forward(self) -> None:
        """Stand aside from a forward that the others make: it counts here too, and nobody waits for this rank in it.

        For a rank without any work, owned layers included. Raises `StateError` inside a forward, and with a reader
        whose reads need all ranks.
        """
        self._remote.skip()

    def wait_for_readers(self) -> None:
        """Return when no rank reads rows of this one for an earlier forward: before writing `region_tensor` directly.

        `write`, `move` and `restore` wait by themselves. Raises `DeadlineExceeded` naming the rank that still reads.
        """
        self._remote.wait_for_readers()

    def read(self, component: str, layer: int) -> torch.Tensor:
        """A layer with every page at its position: the owned region itself, or scratch.

        In scratch only these rows are valid: the prefix of the forward's spans, rows that this rank has written in
        this forward, and rows moved or restored in it. Everything else holds old bytes. Collective unless every rank
        has the layer. Raises `LayoutError`, `StateError` outside a forward, `IntegrityError`, `DeadlineExceeded`.
        """
        return self._remote.read(self._key(component, layer))

    def read_compacted(self, component: str, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The live pages of a layer, uint8 [num_live_pages, page_bytes], and where each page went.

        The second is int64 [num_pages]: position of a page id in the first, -1 for pages that are not live. Both are
        copies: later writes do not show in them. Rows as in `read`, which this calls.
        """
        self._remote.check_eager(f"a compacted read of {component!r} layer {layer}")
        whole = self.read(component, layer)
        forward = self._remote.running(f"compacted read of {component!r} layer {layer}")
        live = forward.prefix(self.layout.component(component).page_group)
        page_ids = torch.from_numpy(live.page_ids).to(self.device)
        remap = torch.full((self.num_pages,), -1, dtype=torch.int64, device=self.device)
        remap[page_ids] = torch.arange(live.num_pages, device=self.device)
        return whole.index_select(0, page_ids), remap

    def rows(self, component: str, layer: int, field: str, slots: torch.Tensor) -> torch.Tensor:
        """The bytes of `field` at `slots` (int64 [n], page * page_size + row): uint8 [n, token_bytes], a copy.

        Inside a forward this is a `read` (and as collective); outside, only owned layers can be asked for.
        """
        about = self.layout.component(component)
        slots = self._look(slots, about).here
        whole = self.region_tensor(component, layer) if self._remote.forward is None else self.read(component, layer)
        return read_rows(whole, about, about.field(field), *split_slots(slots, about.page_size))

    def owned_rows(self, component: str, layer: int, field: str, slots: torch.Tensor) -> torch.Tensor:
        """The bytes of `field` of an owned layer at `slots`, a copy as in `rows`, inside a forward or not."""
        about = self.layout.component(component)
        slots = self._look(slots, about).here
        region = self.region_tensor(component, layer)
        self._remote.wait_for_load((component, layer))
        return read_rows(region, about, about.field(field), *split_slots(slots, about.page_size))

    def write(self, component: str, layer: int, slots: torch.Tensor, fields: Mapping[str, torch.Tensor]) -> None:
        """Write token rows: `fields` has uint8 [n, token_bytes] for each field written, `slots` is int64 [n].

        All ranks call it alike. The owner writes its region. Another rank keeps rows of the current chunk for this
        forward and puts them into scratch, now or when the layer comes: they never come from the owner. Rows of the
        prefix are changed history, so scratch of that layer is invalid from then on. Outside a forward only the owner
        does anything. The caller may reuse `fields` at once. Raises `LayoutError`.
        """
        key = self._key(component, layer)
        about = self.layout.component(component)
        known = self._look(slots, about)
        for name, data in fields.items():
            check_rows(about, about.field(name), data, len(slots))
        fields = self._beside(fields)
        with self._remote.writing(about, layer, known) as history:
            if key in self._regions:
                put_fields(self._regions.tensor(key), about, known.here, fields)
        self._remote.wrote(about, layer, known, fields, history)

    def move(self, component: str | None, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
        """Move token rows of every layer of `component` (None: of all components), field by field.

        All sources are read before a target is written, so the sets may overlap; targets are distinct. All ranks
        call it alike: owners move, and scratch of the touched layers is invalid on all. Raises `LayoutError`.
        """
        self._remote.check_eager("a move")
        if component is None and len(self.layout.page_groups) > 1:
            raise LayoutError("slots belong to one page group and the layout has several; name the component to move")
        names = [one.name for one in self.layout.components] if component is None else [component]
        # On the device anew, whoever made them before: between forwards nothing says how long a tensor stays as it is.
        source, target = (Slots(one.cpu(), one.to(self.device)) for one in (source_slots, target_slots))
        for about in [self.layout.component(name) for name in names]:
            source.check(about, self.num_pages)
            target.check(about, self.num_pages)
            if len(source) != len(target) or len(torch.unique(target.host)) != len(target):
                raise LayoutError(
                    f"a move needs as many sources as distinct targets, got {len(source)} and "
                    f"{len(torch.unique(target.host))} distinct of {len(target)}"
                )
        moved = [(self.layout.component(name), layer) for name in names for layer in self.layout.component(name).layers]
        with self._remote.changing():
            for about, layer in moved:
                if (about.name, layer) in self._regions:
                    move_rows(self._regions.tensor((about.name, layer)), about, source.here, target.here)
        for about, layer in moved:
            self._remote.supersede((about.name, layer), target)

    def backup(self, component: str, layer: int, pages: Sequence[int]) -> torch.Tensor:
        """A copy of pages of an owned layer, uint8 [len(pages), page_bytes]. Raises `LayoutError` when not owned."""
        region = self.region_tensor(component, layer)
        return region.index_select(0, self._page_ids(pages).to(self.device))

    def restore(self, component: str, layer: int, pages: Sequence[int], data: torch.Tensor | None) -> None:
        """Put back what `backup` gave. All ranks call it alike; those that do not own the layer pass None.

        Scratch of the layer is invalid on all ranks from then on. Raises `LayoutError`.
        """
        self._remote.check_eager("a restore")
        key = self._key(component, layer)
        page_ids = self._page_ids(pages)
        about = self.layout.component(component)
        if (data is not None) != (key in self._regions):
            raise LayoutError(f"restore of {component!r} layer {layer}: its owner gives data, other ranks give None")
        if data is not None and (data.dtype != torch.uint8 or tuple(data.shape) != (len(page_ids), about.page_bytes)):
            raise LayoutError(
                f"restore of {component!r} takes uint8 [{len(page_ids)}, {about.page_bytes}], got {data.dtype} "
                f"{list(data.shape)}"
            )
        with self._remote.changing():
            if data is not None:
                self._regions.tensor(key).index_copy_(0, page_ids.to(self.device), data.to(self.device))
        rows = torch.arange(about.page_size, dtype=torch.int64)
        slots = (page_ids[:, None] * about.page_size + rows).reshape(-1)
        self._remote.supersede(key, Slots(slots, slots.to(self.device)))

    def restore_rows(
        self, component: str, layer: int, slots: torch.Tensor, fields: Mapping[str, torch.Tensor] | None
    ) -> None:
        """Put rows back at `slots`, field by field as in `write`, wherever `fields` lies.

        Like `restore` all ranks call it alike, those that do not own the layer with None, and scratch of the layer is
        invalid from then on. Raises `LayoutError`.
        """
        self._remote.check_eager("a restore")
        key = self._key(component, layer)
        about = self.layout.component(component)
        known = self._look(slots, about)
        if (fields is not None) != (key in self._regions):
            raise LayoutError(f"rows of {component!r} layer {layer}: its owner gives fields, other ranks give None")
        for name, data in (fields or {}).items():
            check_rows(about, about.field(name), data, len(slots))
        with self._remote.changing():
            if fields is not None:
                put_fields(self._regions.tensor(key), about, known.here, self._beside(fields))
        self._remote.supersede(key, known)

    def wait_for_loads(self, wait: Callable[[str, int], None] | None) -> None:
        """`wait(component, layer)` is called before rows of an owned layer are read or sent, and returns once its load
        from elsewhere (a host pool) is there, or has made the current stream wait for it. None: nothing is loaded.

        Where each rank gathers for itself the loads of all split layers are waited for at the begin of a forward,
        since nobody asks the owner after that; else each layer's own is, when it is needed.
        """
        self._remote.fetches.load_wait = wait

    def close(self) -> None:
        """Give owned memory and scratch back; tensors that are still held keep theirs. Twice is fine."""
        self._remote.close()
        self._regions.close()

    def _key(self, component: str, layer: int) -> LayerKey:
        if layer not in self.layout.component(component).layers:
            raise LayoutError(f"component {component!r} has no layer {layer}")
        return component, layer

    def _look(self, slots: torch.Tensor, about: Component) -> Slots:
        known = self._slots.unseen(slots) if self._remote.is_capturing else self._slots.at(slots)
        known.check(about, self.num_pages)
        return known

    def _beside(self, fields: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Rows where the pool lies."""
        if self._remote.is_capturing:
            for data in fields.values():
                check_captured(data, self.device, "rows")
        return fields if self.device is None else {name: data.to(self.device) for name, data in fields.items()}

    def _page_ids(self, pages: Sequence[int]) -> torch.Tensor:
        page_ids = torch.as_tensor(pages, dtype=torch.int64).reshape(-1)
        check_pages(page_ids.numpy(), self.num_pages)
        return page_ids
