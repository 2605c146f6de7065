"""Owns the staging memory of one role of a process, on the host or on one device: one block, registered with backends
and cut into slots.

What is packed into a slot and who reads it is decided by whoever takes it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from pdlink.backends.base import Backend
from pdlink.backends.copiers import open_copier
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


class Block(Protocol):
    """Memory that lies still until `close`."""

    address: int

    def close(self) -> None: ...


class Arena:
    """`num_slots` slots of `slot_bytes` bytes. `close` twice is fine, and comes after everything that uses a slot.

    On the host, a `shared` one serves backends that gather too, which can only read shared memory; any other takes no
    memory before it is used. On a device every one serves them. Memory rule: a slot is written by whoever took it, or
    by a pull that it posted, until it is given back.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        backends: Iterable[Backend],
        *,
        shared: bool,
        memory: MemoryKind = MemoryKind.HOST,
        device: int = 0,
    ) -> None:
        """Raises `BackendError` when there is not enough memory: /dev/shm for a shared one, or the device's."""
        able = [one for one in backends if memory in one.capabilities.memory]
        is_seen = shared or memory is MemoryKind.CUDA
        self._backends = [one for one in able if is_seen or not one.capabilities.gathers]
        self.block = _allocate(num_slots * slot_bytes, shared, memory, device)
        names = tuple(sorted(one.name for one in self._backends))
        self.area = StagingArea(self.block.address, slot_bytes, num_slots, names, memory, device)
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


def open_arena(
    settings: Settings, backends: Mapping[str, Backend], memory: MemoryKind = MemoryKind.HOST, device: int = 0
) -> Arena | None:
    """The arena that `settings` ask for, in memory of one kind and device; None where nothing would ever be staged.

    Where the way was not forced, an arena that cannot be had is done without, and that is logged.
    """
    forced = settings.way == "staged"
    able = [one for one in backends.values() if memory in one.capabilities.memory]
    pays = settings.way == "auto" and not all(one.capabilities.gathers for one in able)
    if not settings.staging_slots or not (forced or pays):
        return None
    slot_bytes = settings.staging_slot_bytes if memory is MemoryKind.HOST else settings.staging_device_slot_bytes
    try:
        open_copier(memory, device).close()  # what packs has to work here too
        return Arena(settings.staging_slots, slot_bytes, able, shared=forced, memory=memory, device=device)
    except BackendError as error:
        if forced:
            raise
        named = "PDLINK_STAGING_SLOT_BYTES" if memory is MemoryKind.HOST else "PDLINK_STAGING_DEVICE_SLOT_BYTES"
        log.warning("pages move without staging: %s (PDLINK_STAGING_SLOTS, %s)", error, named)
        return None


def _allocate(nbytes: int, shared: bool, memory: MemoryKind, device: int) -> Block:
    if memory is MemoryKind.CUDA:
        # Here, because a process without device memory has no use for it.
        from pdlink.backends.cuda_driver import DeviceBlock

        return DeviceBlock(nbytes, device)
    return Segment.create(nbytes) if shared else PrivateBlock(nbytes)
