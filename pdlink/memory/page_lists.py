"""Owns the page lists of one forward on a device: each set of live pages goes there once, not once a layer."""

from __future__ import annotations

from pdlink.memory.forward import LivePages
from pdlink.memory.pool_device import PageList, PoolDevice


class PageLists:
    """Lists by the very object that they were made of. One thread."""

    def __init__(self, device: PoolDevice) -> None:
        self._device = device
        self._lists: dict[int, tuple[LivePages, PageList]] = {}

    def of(self, live: LivePages) -> PageList:
        """The page ids of `live` on the device, in the order that they have there."""
        found = self._lists.get(id(live))
        if found is None:
            # Kept with its list, so that no other object can get its id meanwhile.
            found = self._lists[id(live)] = live, self._device.list_pages(live.page_ids)
        return found[1]

    def clear(self) -> None:
        self._lists.clear()
