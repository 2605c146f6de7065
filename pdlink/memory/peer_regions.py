"""Owns the layers of other ranks as one rank of the same host has them mapped, and gathers rows from them.

Host memory only: an owner's segments are mapped for reading, and rows are copied by the reader. When that may be done
is not decided here.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping

import numpy as np
import torch

from pdlink.backends.host_copy import copy_rows as copy_ranges
from pdlink.backends.shm import AttachedSegment, attach, locate
from pdlink.errors import RegionError
from pdlink.layout import CacheLayout, Component
from pdlink.memory.forward import LayerKey, LivePages
from pdlink.memory.owned_regions import OwnedRegions
from pdlink.memory.token_rows import copy_rows

Place = tuple[str, int, int]
"""(segment name, bytes of the segment, offset of the layer in it)."""


def describe_regions(regions: OwnedRegions) -> bytes:
    """Where the owned layers lie, for `read_regions` of another process. Raises `RegionError` for private memory."""
    places = []
    for region in regions.regions():
        where = locate(region.base_address, region.nbytes)
        if where is None:
            raise RegionError(
                f"the memory of {region.component!r} layer {region.layer} cannot be mapped by other processes"
            )
        places.append([region.component, region.layer, where.name, where.nbytes, where.offset])
    return json.dumps(places).encode()


def read_regions(manifest: bytes) -> dict[LayerKey, Place]:
    """The reverse of `describe_regions`."""
    return {
        (component, layer): (name, nbytes, offset)
        for component, layer, name, nbytes, offset in json.loads(manifest.decode())
    }


class MappedLayers:
    """Layers of other ranks, mapped for reading, `num_pages` pages each. One thread.

    Raises `PeerGone` or `RegionError` for a segment that cannot be mapped.

    Memory rule: rows are read while `gather` runs and never after; whoever calls it knows that the owner does not
    write them meanwhile. A mapping outlives its owner.
    """

    def __init__(self, layout: CacheLayout, num_pages: int, places: Mapping[LayerKey, Place]) -> None:
        self._layout = layout
        self._num_pages = num_pages
        self._places = dict(places)
        self._segments: dict[str, AttachedSegment] = {}
        self._tensors: dict[LayerKey, torch.Tensor] = {}
        try:
            for name, nbytes, _ in self._places.values():
                if name not in self._segments:
                    self._segments[name] = attach(name, nbytes)
        except BaseException:
            self.close()
            raise

    def tensor(self, key: LayerKey) -> torch.Tensor:
        """uint8 [num_pages, page_bytes] over the owner's memory, which must only be read.

        Raises `RegionError` when nobody shows the layer, or it does not fit its segment.
        """
        if key not in self._tensors:
            self._tensors[key] = self._map(key)
        return self._tensors[key]

    def gather(self, component: Component, layer: int, live: LivePages, target: torch.Tensor) -> int:
        """Copy the rows of `live` from the owner to the same places of `target`; returns how many bytes they are.

        Whole pages go in runs, page padding and all; of partial pages only the rows go.
        """
        source = self.tensor((component.name, layer))
        starts, lengths = page_runs(live.page_ids[: live.num_full])
        nbytes = lengths * component.page_bytes
        offsets = starts * component.page_bytes
        copy_ranges((target.data_ptr() + offsets).tolist(), (source.data_ptr() + offsets).tolist(), nbytes.tolist())
        position, row = live.partial_rows()
        if len(position):
            pages = torch.from_numpy(live.page_ids[position])
            copy_rows(component, source, pages, target, pages, torch.from_numpy(row))
        row_nbytes = sum(field.token_bytes for field in component.fields)
        return int(nbytes.sum()) + len(position) * row_nbytes

    def begin(self) -> None:
        """A forward begins; nothing is kept from one to the next."""

    def land(self, key: LayerKey) -> None:
        """A gather that has returned is over."""

    def close(self) -> None:
        """Unmap everything; twice is fine."""
        self._tensors.clear()
        for one in self._segments.values():
            one.close()
        self._segments.clear()

    def _map(self, key: LayerKey) -> torch.Tensor:
        if key not in self._places:
            raise RegionError(f"no rank of the shard group shows {key[0]!r} layer {key[1]}")
        name, nbytes, offset = self._places[key]
        page_bytes = self._layout.component(key[0]).page_bytes
        wanted = self._num_pages * page_bytes
        if offset < 0 or offset + wanted > nbytes:
            raise RegionError(
                f"{key[0]!r} layer {key[1]} would need bytes {offset} to {offset + wanted} of a segment of {nbytes}"
            )
        # Through its address: torch warns of arrays that cannot be written, and nobody writes this one.
        memory = (ctypes.c_uint8 * wanted).from_address(self._segments[name].address + offset)
        return torch.from_numpy(np.ctypeslib.as_array(memory)).view(self._num_pages, page_bytes)


def page_runs(page_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 [m] first pages and int64 [m] lengths of the runs of neighbours in ascending `page_ids` (int64 [n])."""
    if not len(page_ids):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    breaks = np.flatnonzero(np.diff(page_ids) != 1) + 1
    first = np.concatenate(([0], breaks))
    return page_ids[first], np.diff(np.concatenate((first, [len(page_ids)])))
