"""Owns the layer-sharded pool: owned layers in memory, and one face for reads and writes of all of them.

How layers of other ranks are fetched, and what makes a copy stale, is `remote_layers`; where a token's bytes lie in a
page is `token_rows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pdlink.errors import LayoutError
from pdlink.layout import CacheLayout, OwnedLayers, Region
from pdlink.memory.broadcast_reader import BroadcastReader
from pdlink.memory.forward import LayerKey, ReadSpan, check_pages
from pdlink.memory.owned_regions import OwnedRegions
from pdlink.memory.remote_layers import PoolStats, RemoteLayers
from pdlink.memory.token_rows import check_rows, check_slots, move_rows, put_fields, read_rows, split_slots

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
        if reader is not None:
            reader.owners.check_owned(reader.rank, self.owned)
        self._regions = OwnedRegions(layout, self.owned, num_pages)
        try:
            self._remote = RemoteLayers(layout, self._regions, reader, num_pages, scratch_slots)
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
        return self._remote.nbytes

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
        return self._remote.buffers(component)

    def begin_forward(self, spans: Sequence[ReadSpan], layer_order: Sequence[LayerKey] | None = None) -> None:
        """Say which prefix tokens the batch reads, and in which order its layers will be read, if that is known.

        Collective: one record of forward number, page ids, counts and layer order is compared across the shard group.
        Raises `LayoutError` for spans that cannot be, `StateError` inside a forward, `IntegrityError` when ranks
        disagree, `DeadlineExceeded` when one does not come.
        """
        self._remote.begin(spans, layer_order or ())

    def end_forward(self) -> None:
        """End the forward; scratch holds nothing afterwards. Collective.

        Raises the failure of this forward if it had one, else `IntegrityError` when the ranks did not read alike.
        """
        self._remote.end()

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
        whole = self.read(component, layer)
        forward = self._remote.running(f"compacted read of {component!r} layer {layer}")
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
        whole = self.region_tensor(component, layer) if self._remote.forward is None else self.read(component, layer)
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
            put_fields(self._regions.tensor(key), about, slots, fields)
        self._remote.wrote(about, layer, slots, fields)

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
                self._remote.supersede((about.name, layer), target_slots)

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
        self._remote.supersede(key, (page_ids[:, None] * about.page_size + rows).reshape(-1))

    def close(self) -> None:
        """Give owned memory and scratch back; tensors that are still held keep theirs. Twice is fine."""
        self._remote.close()
        self._regions.close()

    def _key(self, component: str, layer: int) -> LayerKey:
        if layer not in self.layout.component(component).layers:
            raise LayoutError(f"component {component!r} has no layer {layer}")
        return component, layer

    def _page_ids(self, pages: Sequence[int]) -> torch.Tensor:
        page_ids = torch.as_tensor(pages, dtype=torch.int64).reshape(-1)
        check_pages(page_ids.numpy(), self.num_pages)
        return page_ids
