"""Owns recognisable bytes: what a page of a test transfer must hold, and pools filled and checked with them.

Each 8-byte word is a hash of (transfer, component, layer, page position, offset), so a page in the wrong place, of the
wrong layer or of another request is told from the right one by its first word.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdlink.backends.shm import Segment
from pdlink.layout.components import CacheLayout
from pdlink.layout.layer_plan import OwnedLayers
from pdlink.layout.regions import Region

SENTINEL = 0xEE
GUARD_PAGES = 1
Bytes = npt.NDArray[np.uint8]


def page_pattern(transfer_id: str, component: str, layer: int, position: int, nbytes: int) -> Bytes:
    """uint8 [nbytes]: what the page at `position` of a request holds."""
    seed = np.uint64(zlib.crc32(f"{transfer_id}/{component}".encode()))
    key = (seed << np.uint64(32)) ^ np.uint64(layer << 24) ^ np.uint64(position)
    words = np.arange(-(-nbytes // 8), dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = _mix(words * np.uint64(0x9E3779B97F4A7C15) + _mix(key))
    return mixed.view(np.uint8)[:nbytes]


@dataclass(frozen=True, slots=True)
class WrongPage:
    """A page that does not hold what it should. `offset` is the first wrong byte."""

    component: str
    layer: int
    page: int
    offset: int

    def __str__(self) -> str:
        return f"{self.component!r} layer {self.layer}, page {self.page}, from byte {self.offset}"


class PatternPool:
    """Regions in shared memory for the owned cells of a layout, all sentinel bytes, with guard pages on either side."""

    def __init__(self, layout: CacheLayout, owned: OwnedLayers, num_pages: int, *, page_gap: int = 0) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self._segments: list[Segment] = []
        self._views: dict[tuple[str, int], Bytes] = {}
        self.regions: tuple[Region, ...] = ()
        for name, layers in owned.items():
            nbytes = layout.component(name).page_bytes
            for layer in layers:
                self._add(name, layer, nbytes, nbytes + page_gap)

    def view(self, component: str, layer: int) -> Bytes:
        """uint8 [num_pages, page_bytes], writable, without guards and gaps."""
        nbytes = self.layout.component(component).page_bytes
        return self._views[component, layer][GUARD_PAGES : GUARD_PAGES + self.num_pages, :nbytes]

    def fill(
        self, transfer_id: str, pages: Mapping[str, Sequence[int]], start: Mapping[str, int] | None = None
    ) -> None:
        """Write the pattern of a request into its pages (page group -> page ids), in every owned cell."""
        for component, layer, position, page in self._cells(pages, start):
            nbytes = self.layout.component(component).page_bytes
            self.view(component, layer)[page] = page_pattern(transfer_id, component, layer, position, nbytes)

    def find_wrong(
        self, transfer_id: str, pages: Mapping[str, Sequence[int]], start: Mapping[str, int] | None = None
    ) -> WrongPage | None:
        """The first page of a request that differs from its pattern."""
        for component, layer, position, page in self._cells(pages, start):
            found = self.view(component, layer)[page]
            wanted = page_pattern(transfer_id, component, layer, position, len(found))
            if not np.array_equal(found, wanted):
                return WrongPage(component, layer, page, int(np.argmin(found == wanted)))
        return None

    def find_touched(self, used: Mapping[str, Iterable[int]] | None = None) -> WrongPage | None:
        """The first page, guard or gap outside `used` (page group -> page ids) that is not all sentinel."""
        for (component, layer), view in self._views.items():
            group = self.layout.component(component).page_group
            nbytes = self.layout.component(component).page_bytes
            touched = view != SENTINEL
            for page in (used or {}).get(group, ()):
                touched[GUARD_PAGES + page, :nbytes] = False
            if touched.any():
                page, offset = (int(one) for one in np.argwhere(touched)[0])
                return WrongPage(component, layer, page - GUARD_PAGES, offset)
        return None

    def close(self) -> None:
        self._views.clear()
        for segment in self._segments:
            segment.close()

    def _add(self, name: str, layer: int, page_bytes: int, stride: int) -> None:
        rows = self.num_pages + 2 * GUARD_PAGES
        segment = Segment.create(rows * stride)
        self._segments.append(segment)
        view = segment.array.reshape(rows, stride)
        view[:] = SENTINEL
        self._views[name, layer] = view
        base = segment.address + GUARD_PAGES * stride
        self.regions += (Region(name, layer, base, stride, page_bytes, self.num_pages),)

    def _cells(
        self, pages: Mapping[str, Sequence[int]], start: Mapping[str, int] | None
    ) -> Iterable[tuple[str, int, int, int]]:
        for component, layer in self._views:
            group = self.layout.component(component).page_group
            for number, page in enumerate(pages.get(group, ())):
                yield component, layer, (start or {}).get(group, 0) + number, int(page)


def _mix(words: npt.NDArray[np.uint64] | np.uint64) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        x = np.asarray(words, dtype=np.uint64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
        return mixed
