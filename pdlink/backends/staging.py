"""Owns the staging memory of one role of a process: one shared segment, registered with every backend, cut into slots.

What is packed into a slot and who reads it is decided by whoever takes it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from pdlink.backends.base import Backend
from pdlink.backends.shm import Segment
from pdlink.backends.slots import SlotPool
from pdlink.config import Settings
from pdlink.errors import BackendUnavailable
from pdlink.layout.regions import MemoryKind
from pdlink.layout.staging import StagingArea

log = logging.getLogger("pdlink.backends")


class Arena:
    """`num_slots` slots of `slot_bytes` bytes. `close` twice is fine, and comes after everything that uses a slot.

    Memory rule: a slot is written by whoever took it, or by a pull that it posted, until it is given back.
    """

    def __init__(self, num_slots: int, slot_bytes: int, backends: Iterable[Backend]) -> None:
        """Raises `BackendUnavailable` when /dev/shm has not enough room."""
        self._segment = Segment.create(num_slots * slot_bytes)
        self.area = StagingArea(self._segment.address, slot_bytes, num_slots)
        self.slots = SlotPool(num_slots)
        self._backends = [one for one in backends if MemoryKind.HOST in one.capabilities.memory]
        self.backends = frozenset(one.name for one in self._backends)
        """Names of those that may move bytes between slots."""
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
        self._segment.close()


def open_arena(settings: Settings, backends: Mapping[str, Backend]) -> Arena | None:
    """The arena that `settings` ask for; None where nothing would ever be staged, so that no memory is taken.

    Where the way was not forced, an arena that finds no room is done without, and that is logged.
    """
    pays = any(one.capabilities.cost_per_descriptor_s > 0 for one in backends.values())
    wanted = settings.way == "staged" or (settings.way == "auto" and pays)
    if not wanted or not settings.staging_slots:
        return None
    try:
        return Arena(settings.staging_slots, settings.staging_slot_bytes, backends.values())
    except BackendUnavailable as error:
        if settings.way == "staged":
            raise
        log.warning("pages move without staging: %s (PDLINK_STAGING_SLOTS, PDLINK_STAGING_SLOT_BYTES)", error)
        return None
