"""Owns how the ranks of a shard group find each other's boards and layers when a pool is made, and let go of them.

What is done over these links is decided by `peer_reader`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

import numpy as np
import torch

from pdlink.errors import PdlinkError
from pdlink.layout import CacheLayout, Component
from pdlink.memory.communicator import Communicator
from pdlink.memory.device_boards import DeviceBoards, make_words, wait_until_over
from pdlink.memory.device_regions import DeviceLayers, describe_device
from pdlink.memory.forward import LayerKey, LivePages
from pdlink.memory.lockstep import Step
from pdlink.memory.owned_regions import OwnedRegions
from pdlink.memory.peer_board import PeerBoards
from pdlink.memory.peer_regions import MappedLayers, Place, describe_regions, read_regions
from pdlink.memory.pool_device import DeviceMemory

_PLACE_NBYTES = 64
_LEAVE_S = 5.0


class Boards(Protocol):
    """What the ranks let each other see of their progress: `PeerBoards`, or on devices `DeviceBoards`."""

    global_ranks: tuple[int, ...]

    def advance_written(self, epoch: int) -> None: ...

    def advance_read(self, epoch: int) -> None: ...

    def fail(self, forward: int) -> None: ...

    def post(self, step: Step) -> None: ...

    def records(self, forward: int, what: str) -> list[Step]: ...

    def wait_written(self, rank: int, epoch: int, forward: int, what: Callable[[], str]) -> None: ...

    def wait_read(self, epoch: int, forward: int, what: str) -> None: ...

    def confirm(self, forward: int, what: str) -> None: ...

    def close(self) -> None: ...


class Layers(Protocol):
    """Other ranks' layers: `MappedLayers`, or on devices `DeviceLayers`."""

    def begin(self) -> None: ...

    def gather(self, component: Component, layer: int, live: LivePages, target: torch.Tensor) -> int: ...

    def land(self, key: LayerKey) -> None: ...

    def close(self) -> None: ...


class PeerLinks:
    """The boards and layers of all ranks of a group, as one of them has them for one pool. `close` twice is fine; on
    devices it waits a while for the others to close theirs.

    Making them is collective: every rank shows its own and maps the others'. Raises `PeerGone`, `RegionError`,
    `BackendUnavailable` and what the communicator raises, with nothing left behind.
    """

    boards: Boards
    layers: Layers

    def __init__(
        self,
        communicator: Communicator,
        owners: Mapping[LayerKey, int],
        layout: CacheLayout,
        regions: OwnedRegions,
        timeout_s: float,
    ) -> None:
        self._device = regions.device
        self._timeout_s = timeout_s
        self._words: DeviceMemory | None = None
        self._opened: list[PeerBoards | Layers] = []
        try:
            if self._device is None:
                manifest = describe_regions(regions)
            else:
                self._words = make_words(self._device)
                manifest = describe_device(self._device, regions, self._words)
            boards = PeerBoards(communicator.rank, communicator.global_ranks, manifest, timeout_s=timeout_s)
            self._opened.append(boards)
            place = np.zeros(_PLACE_NBYTES, np.uint8)
            text = f"{boards.name} {boards.nbytes}".encode()
            place[: len(text)] = np.frombuffer(text, np.uint8)
            every = communicator.gather(torch.from_numpy(place.view(np.int64)), "the making of a pool").numpy()
            found = [row.tobytes().rstrip(b"\0").decode().split() for row in every]
            boards.connect([(name, int(nbytes)) for name, nbytes in found])
            others = [None if rank == boards.rank else boards.manifest(rank) for rank in range(len(found))]
            if self._device is None or self._words is None:
                self.boards, self.layers = boards, _map_host(layout, regions.num_pages, others, owners)
            else:
                mapped = DeviceLayers(self._device, regions.num_pages, others, owners)
                words = [mapped.words.get(rank, self._words.address) for rank in range(len(found))]
                self.boards, self.layers = DeviceBoards(boards, self._device, words), mapped
            self._opened.append(self.layers)
            # From here on a rank may close its pool: the others have all that they need of it.
            communicator.gather(torch.from_numpy(place.view(np.int64)), "the mapping of a pool")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._device is not None and self._opened:
            # Waits of the COMPUTE lane look at mapped words as well. What cannot end is given up: it is bounded by its
            # own time limits, and its device by nothing else.
            self._device.fork()
            with suppress(PdlinkError):
                wait_until_over(self._device, self._device.mark(), self._timeout_s, "the end of gathers")
        for one in reversed(self._opened):
            if isinstance(one, PeerBoards) and self._device is not None:
                # Memory of a device may not be freed while a peer has it mapped; this rank has just let go of theirs.
                one.leave(min(self._timeout_s, _LEAVE_S))
            one.close()
        self._opened.clear()
        if self._words is not None:
            self._words.close()


def _map_host(
    layout: CacheLayout, num_pages: int, manifests: list[bytes | None], owners: Mapping[LayerKey, int]
) -> MappedLayers:
    places: dict[LayerKey, Place] = {}
    for rank, manifest in enumerate(manifests):
        if manifest is not None:
            shown = read_regions(manifest)
            places.update({key: at for key, at in shown.items() if owners.get(key) == rank})
    return MappedLayers(layout, num_pages, places)
