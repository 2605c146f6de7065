"""Owns the staging memory of one role of a process: one block, registered with backends and cut into slots.

What is packed into a slot and who reads it is decided by whoever takes it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Iterable, Mapping

import numpy as np

from pdlink.backends.base import Backend
from pdlink.backends.shm import Segment
from pdlink.backends.slots import SlotPool
from pdlink.config import Settings
from pdlink.errors import BackendError
from pdlink.layout.regions import MemoryKind
from pdlink.layout.staging import StagingArea

log = logging.getLogger("pdlink.backends")


class PrivateBlock:
    """Zero-filled memory of this process alone, which takes none before it is touched. `close` twice is fine."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes)
        self.address = int(np.frombuffer(self._map, dtype=np.uint8).__array_interface__["data"][0])

    def close(self) -> None:
        with contextlib.suppress(BufferError):
            self._map.close()


class Arena:
    """`num_slots` slots of `slot_bytes` bytes. `close` twice is fine, and comes after everything that uses a slot.

    A `shared` one serves backends that gather too, which can only read shared memory; any other takes no memory before
    it is used. Memory rule: a slot is written by whoever took it, or by a pull that it posted, until it is given back.
    """

    def __init__(self, num_slots: int, slot_bytes: int, backends: Iterable[Backend], *, shared: bool) -> None:
        """Raises `BackendUnavailable` when /dev/shm has not enough room for a shared one."""
        host = [one for one in backends if MemoryKind.HOST in one.capabilities.memory]
        self._backends = [one for one in host if shared or not one.capabilities.gathers]
        nbytes = num_slots * slot_bytes
        self.block = Segment.create(nbytes) if shared else PrivateBlock(nbytes)
        names = tuple(sorted(one.name for one in self._backends))
        self.area = StagingArea(self.block.address, slot_bytes, num_slots, names)
        self.slots = SlotPool(num_slots)
        try:
            for backend in self._backends:
                backend.register(self.area.region())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        backends, self._backends = self._backends, []
        for backend in backends:
            backend.deregister(self.area.region())
        self.block.close()


def open_arena(settings: Settings, backends: Mapping[str, Backend]) -> Arena | None:
    """The arena that `settings` ask for; None where nothing would ever be staged.

    Where the way was not forced, an arena that cannot be had is done without, and that is logged.
    """
    forced = settings.way == "staged"
    pays = settings.way == "auto" and not all(one.capabilities.gathers for one in backends.values())
    if not settings.staging_slots or not (forced or pays):
        return None
    try:
        return Arena(settings.staging_slots, settings.staging_slot_bytes, backends.values(), shared=forced)
    except BackendError as error:
        if forced:
            raise
        log.warning("pages move without staging: %s (PDLINK_STAGING_SLOTS, PDLINK_STAGING_SLOT_BYTES)", error)
        return None
