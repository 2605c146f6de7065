"""Owns the bytes of broadcasts between devices: gather, stamp, broadcast, check and scatter, all in the FETCH lane.

No host waits for a layer. A broadcast that brought something else than its owner sent poisons what follows, and raises
at the end of the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pdlink.layout import Component
from pdlink.memory.broadcast_wire import NothingCame
from pdlink.memory.communicator import Communicator
from pdlink.memory.device_boards import explain, wait_until_over
from pdlink.memory.forward import LayerKey, LivePages
from pdlink.memory.lockstep import RECORD_NBYTES, TRAILER_MAGIC, Step, describe
from pdlink.memory.page_lists import PageLists
from pdlink.memory.pool_device import DataLink, PageCopy, PoolDevice

ALIGNMENT = 16


class DeviceWire:
    """A wire over a `DataLink` of the ranks of `communicator`, which is made when the first forward begins.

    `nbytes_before` have been moved by others that are counted together with this one.
    """

    def __init__(
        self, device: PoolDevice, communicator: Communicator, components: Sequence[str], nbytes_before: int = 0
    ) -> None:
        self._device = device
        self._communicator = communicator
        self._components = components
        self._link: DataLink | None = None
        self._generation = 0
        self._lists = PageLists(device)
        self._marks: dict[LayerKey, object] = {}
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._outgrown: list[torch.Tensor] = []
        self._nbytes_moved = nbytes_before
        self._is_under_way = False

    @property
    def nbytes_moved(self) -> int:
        return self._nbytes_moved

    @property
    def nbytes_staging(self) -> int:
        return self._staging.nbytes

    def begin(self) -> None:
        self._lists.clear()
        self._marks.clear()
        # A forward may have failed on some ranks before they had launched anything: they alone have kept their link.
        mine = torch.tensor([self._generation if self._link else 0])
        every = self._communicator.gather(mine, "the begin of broadcasts").reshape(-1)
        if int(every.min()) != int(every.max()) or self._link is None:
            self.abandon()
            self._link = self._device.link(self._communicator)
            self._generation = int(every.max()) + 1

    def move(
        self,
        step: Step,
        owner: int,
        component: Component,
        live: LivePages,
        region: torch.Tensor | None,
        scratch: torch.Tensor | None,
    ) -> None:
        """Launch it all. Pages travel whole, with what else is in them."""
        device, link, pages = self._device, self._link, self._lists.of(live)
        assert link is not None, "a forward has begun"
        nbytes = live.num_pages * component.page_bytes
        trailer = -(-nbytes // ALIGNMENT) * ALIGNMENT
        wire = self._wire(trailer + RECORD_NBYTES)
        # Scratch may still be in use by what the engine has launched, and rows of the region be written.
        device.fork()
        words = step.pack(TRAILER_MAGIC)
        self._is_under_way = True
        if region is not None:
            device.copy(PageCopy(region.data_ptr(), wire, component.page_bytes, pages, target_is_packed=True))
            device.stamp(wire + trailer, words)
        link.broadcast(wire, trailer + RECORD_NBYTES, owner)
        self._nbytes_moved += trailer + RECORD_NBYTES
        if scratch is not None:
            device.check_stamp(wire + trailer, words, owner)
            device.copy(PageCopy(wire, scratch.data_ptr(), component.page_bytes, pages, source_is_packed=True))
        self._marks[component.name, step.layer] = device.mark()

    def land(self, key: LayerKey) -> None:
        mark = self._marks.pop(key, None)
        if mark is not None:
            self._device.join(mark)

    def settle(self) -> None:
        if self._is_under_way:
            self._device.join(self._device.mark())

    def confirm(self, step: Step, watch: Callable[[], None]) -> None:
        if not self._is_under_way:
            return
        what = describe(step, self._components)
        wait_until_over(self._device, self._device.mark(), self._communicator.timeout_s, what, watch)
        self._is_under_way = False
        self._outgrown.clear()
        found = self._device.trouble()
        if found is not None:
            self._device.clear_trouble()
            raise NothingCame(str(explain(found, what, self._communicator.global_ranks)))

    def abandon(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.abort()
        self._rest()

    def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            # What a failed forward left would never end by itself.
            link.abort() if self._is_under_way else link.close()
        self._rest()
        self._lists.clear()
        self._marks.clear()
        self._staging = torch.empty(0, dtype=torch.uint8)

    def _rest(self) -> None:
        """Until nothing is under way, which does not take long once no broadcast can wait for others."""
        if self._is_under_way:
            wait_until_over(self._device, self._device.mark(), self._communicator.timeout_s, "the end of broadcasts")
            self._is_under_way = False
            self._outgrown.clear()
            self._device.clear_trouble()

    def _wire(self, nbytes: int) -> int:
        """The address of the buffer, which has at least `nbytes` bytes."""
        if self._staging.nbytes < nbytes:
            # Moves that are under way still use what it was.
            self._outgrown.append(self._staging)
            self._staging = self._device.scratch((nbytes,))
        return self._staging.data_ptr()
