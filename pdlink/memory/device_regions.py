"""Owns the layers of other ranks as one rank's device has them mapped, and the gathers from them, which it launches.

When rows may be gathered is not decided here. Pages are gathered whole: rows of a page that are not of the prefix are
either this rank's own, which are put there again behind the gather, or of no use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pdlink.errors import RegionError
from pdlink.layout import Component
from pdlink.memory.forward import LayerKey, LivePages
from pdlink.memory.owned_regions import OwnedRegions
from pdlink.memory.page_lists import PageLists
from pdlink.memory.pool_device import DeviceMemory, PageCopy, PeerMemory, PoolDevice


def describe_device(device: PoolDevice, regions: OwnedRegions, words: DeviceMemory) -> bytes:
    """What others need to map of this rank: its words, and its layers as places in blocks."""
    blocks = regions.blocks
    layers = []
    for region in regions.regions():
        index = next(
            at for at, one in enumerate(blocks) if one.address <= region.base_address < one.address + one.nbytes
        )
        layers.append([region.component, region.layer, index, region.base_address - blocks[index].address])
    shown = [device.show(one) for one in blocks]
    return json.dumps({"words": device.show(words), "blocks": shown, "layers": layers}).encode()


class DeviceLayers:
    """Words and layers of other ranks, mapped for reading, `num_pages` pages each. One thread.

    `manifests` are what the ranks described, None for the own; of their layers those count that `owners` says are
    theirs. Raises `PeerGone`, `BackendUnavailable` or
    `RegionError`. Memory rule as in `MappedLayers`; `close` comes once nothing is under way, and twice is fine.
    """

    def __init__(
        self,
        device: PoolDevice,
        num_pages: int,
        manifests: Sequence[bytes | None],
        owners: Mapping[LayerKey, int],
    ) -> None:
        self._device = device
        self._num_pages = num_pages
        self._lists = PageLists(device)
        self._mapped: list[PeerMemory] = []
        self._owners = owners
        # The address of each layer, and how many bytes of its block are left from there.
        self._places: dict[LayerKey, tuple[int, int]] = {}
        self._marks: dict[LayerKey, object] = {}
        self.words: dict[int, int] = {}
        try:
            for rank, manifest in enumerate(manifests):
                if manifest is not None:
                    self._map(rank, json.loads(manifest.decode()))
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        """A forward begins: lists of the one before are not asked for any more."""
        self._lists.clear()
        self._marks.clear()

    def gather(self, component: Component, layer: int, live: LivePages, target: torch.Tensor) -> int:
        """Launch the copies of the pages of `live` to the same places of `target`; returns how many bytes they are."""
        key = (component.name, layer)
        try:
            source, nbytes = self._places[key]
        except KeyError:
            raise RegionError(f"no rank of the shard group shows {component.name!r} layer {layer}") from None
        if nbytes < self._num_pages * component.page_bytes:
            raise RegionError(
                f"{component.name!r} layer {layer} has {nbytes} bytes in its owner's block, and "
                f"{self._num_pages} pages of {component.page_bytes} are to be read"
            )
        # The scratch slot may still be in use by what the engine has launched, and rows of it be put there.
        self._device.fork()
        copy = PageCopy(source, target.data_ptr(), component.page_bytes, self._lists.of(live))
        self._device.copy(copy)
        self._marks[key] = self._device.mark()
        return copy.nbytes

    def land(self, key: LayerKey) -> None:
        """What the engine launches from here on comes after the gather of a layer."""
        mark = self._marks.pop(key, None)
        if mark is not None:
            self._device.join(mark)

    def close(self) -> None:
        self._lists.clear()
        self._marks.clear()
        for one in self._mapped:
            one.close()
        self._mapped.clear()

    def _map(self, rank: int, told: dict[str, Any]) -> None:
        words = self._device.map(told["words"])
        self._mapped.append(words)
        self.words[rank] = words.address
        blocks = []
        for shown in told["blocks"]:
            blocks.append(self._device.map(shown))
            self._mapped.append(blocks[-1])
        for component, layer, index, offset in told["layers"]:
            if self._owners.get((component, layer)) == rank:
                self._places[component, layer] = blocks[index].address + offset, blocks[index].nbytes - offset
