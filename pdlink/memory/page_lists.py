"""Owns the page lists of one forward on a device: each set of live pages goes there once, not once a layer."""

from __future__ import annotations

import numpy as np

from pdlink.memory.forward import LivePages
from pdlink.memory.pool_device import PageList, PoolDevice


class PaddedPages(LivePages):
    """Live pages that are only known when a graph is replayed, and are in `pages` by then. Holds none itself."""

    pages: PageList

    def __init__(self, page_size: int, pages: PageList) -> None:
        super().__init__(np.empty(0, np.int64), np.empty((0, page_size), np.bool_))
        object.__setattr__(self, "pages", pages)

    @property
    def num_pages(self) -> int:
        """As many as there may be."""
        return self.pages.num_pages


class PageLists:
    """Lists by the very object that they were made of. One thread."""

    def __init__(self, device: PoolDevice) -> None:
        self._device = device
        self._lists: dict[int, tuple[LivePages, PageList]] = {}

    def of(self, live: LivePages) -> PageList:
        """The page ids of `live` on the device, in the order that they have there."""
        if isinstance(live, PaddedPages):
            return live.pages
        found = self._lists.get(id(live))
        if found is None:
            # Kept with its list, so that no other object can get its id meanwhile.
            found = self._lists[id(live)] = live, self._device.list_pages(live.page_ids)
        return found[1]

    def clear(self) -> None:
        self._lists.clear()
