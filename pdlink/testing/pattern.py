"""Owns recognisable bytes: what a page of a test transfer must hold, and pools filled and checked with them.

Each 8-byte word is a hash of (transfer, component, layer, page position, offset), so a page in the wrong place, of the
wrong layer or of another request is told from the right one by its first word.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pdlink.backends.shm import Segment
from pdlink.layout.components import CacheLayout
from pdlink.layout.layer_plan import OwnedLayers
from pdlink.layout.regions import MemoryKind, Region

SENTINEL = 0xEE
GUARD_PAGES = 1
PATTERN_BYTES = 1 << 20
"""Patterns are made this many bytes at a time, so that they stay in a cache."""
Bytes = npt.NDArray[np.uint8]


def page_pattern(transfer_id: str, component: str, layer: int, position: int, nbytes: int) -> Bytes:
    """uint8 [nbytes]: what the page at `position` of a request holds."""
    page: Bytes = page_patterns(transfer_id, component, layer, [position], nbytes)[0]
    return page


def page_patterns(transfer_id: str, component: str, layer: int, positions: Sequence[int], nbytes: int) -> Bytes:
    """uint8 [len(positions), nbytes]: what the pages at `positions` of a request hold."""
    seed = np.uint64(zlib.crc32(f"{transfer_id}/{component}".encode()))
    keys = (seed << np.uint64(32)) ^ np.uint64(layer << 24) ^ np.asarray(positions, dtype=np.uint64)
    words = np.arange(-(-nbytes // 8), dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = _mix(words * np.uint64(0x9E3779B97F4A7C15) + _mix(keys)[:, None])
    return mixed.view(np.uint8)[:, :nbytes]


@dataclass(frozen=True, slots=True)
class WrongPage:
    """A page that does not hold what it should. `offset` is the first wrong byte."""

    component: str
    layer: int
    page: int
    offset: int

    def __str__(self) -> str:
        return f"{self.component!r} layer {self.layer}, page {self.page}, from byte {self.offset}"


class Block(Protocol):
    """Memory of a pool: `array` is uint8, writable, and begins at `address`."""

    address: int

    @property
    def array(self) -> Bytes: ...

    def close(self) -> None: ...


class PatternPool:
    """Regions for the owned cells of a layout, all sentinel bytes, with guard pages on either side.

    They lie in shared memory unless `allocate` (bytes -> `Block`) takes them from elsewhere, or a subclass keeps them
    on a device. A `sparse` one has no guards, and its gaps are neither written nor looked at.
    """

    memory = MemoryKind.HOST
    device = 0

    def __init__(
        self,
        layout: CacheLayout,
        owned: OwnedLayers,
        num_pages: int,
        *,
        page_gap: int = 0,
        allocate: Callable[[int], Block] = Segment.create,
        sparse: bool = False,
    ) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self._allocate = allocate
        self._sparse = sparse
        self._guards = 0 if sparse else GUARD_PAGES
        self._segments: list[Block] = []
        self._views: dict[tuple[str, int], Bytes] = {}
        self.regions: tuple[Region, ...] = ()
        for name, layers in owned.items():
            nbytes = layout.component(name).page_bytes
            for layer in layers:
                self._add(name, layer, nbytes, nbytes + page_gap)

    def view(self, component: str, layer: int) -> Bytes:
        """uint8 [num_pages, page_bytes], writable, without guards and gaps."""
        return self._rows(component, layer)[self._guards : self._guards + self.num_pages, : self._page_bytes(component)]

    def heads(self, component: str, layer: int, nbytes: int) -> Bytes:
        """uint8 [num_pages, nbytes]: how each page begins. Cheap wherever the pages lie."""
        return self.view(component, layer)[:, :nbytes]

    def fill(
        self, transfer_id: str, pages: Mapping[str, Sequence[int]], start: Mapping[str, int] | None = None
    ) -> None:
        """Write the pattern of a request into its pages (page group -> page ids), in every owned cell."""
        for region in self.regions:
            group = self.layout.component(region.component).page_group
            nbytes, ids = region.page_bytes, pages.get(group, ())
            at_once = max(1, PATTERN_BYTES // nbytes)
            for first in range(0, len(ids), at_once):
                some = ids[first : first + at_once]
                begin = (start or {}).get(group, 0) + first
                positions = range(begin, begin + len(some))
                made = page_patterns(transfer_id, region.component, region.layer, positions, nbytes)
                self._put(region.component, region.layer, some, made)

    def wipe(self) -> None:
        """Write the sentinel over every page."""
        for region in self.regions:
            self.view(region.component, region.layer)[:] = SENTINEL

    def find_wrong(
        self, transfer_id: str, pages: Mapping[str, Sequence[int]], start: Mapping[str, int] | None = None
    ) -> WrongPage | None:
        """The first page of a request that differs from its pattern."""
        for region in self.regions:
            component, layer, nbytes = region.component, region.layer, region.page_bytes
            group = self.layout.component(component).page_group
            view = self.view(component, layer)
            for position, page in enumerate(pages.get(group, ()), start=(start or {}).get(group, 0)):
                wanted = page_pattern(transfer_id, component, layer, position, nbytes)
                if not np.array_equal(view[page], wanted):
                    return WrongPage(component, layer, int(page), int(np.argmin(view[page] == wanted)))
        return None

    def find_touched(self, used: Mapping[str, Iterable[int]] | None = None) -> WrongPage | None:
        """The first page, guard or gap outside `used` (page group -> page ids) that is not all sentinel."""
        for region in self.regions:
            component, layer, nbytes = region.component, region.layer, region.page_bytes
            group = self.layout.component(component).page_group
            rows = self._rows(component, layer)
            touched = (rows[:, :nbytes] if self._sparse else rows) != SENTINEL
            pages = np.fromiter((used or {}).get(group, ()), dtype=np.int64)
            touched[self._guards + pages, :nbytes] = False
            if touched.any():
                page, offset = (int(one) for one in np.argwhere(touched)[0])
                return WrongPage(component, layer, page - self._guards, offset)
        return None

    def close(self) -> None:
        self._views.clear()
        for segment in self._segments:
            segment.close()

    def _add(self, name: str, layer: int, page_bytes: int, stride: int) -> None:
        rows = self.num_pages + 2 * self._guards
        nbytes = rows * stride - (stride - page_bytes if self._sparse else 0)
        shape = (rows, page_bytes if self._sparse else stride)
        base = self._hold(name, layer, nbytes, shape, stride) + self._guards * stride
        self.regions += (
            Region(name, layer, base, stride, page_bytes, self.num_pages, memory=self.memory, device=self.device),
        )

    def _page_bytes(self, component: str) -> int:
        return self.layout.component(component).page_bytes

    # --- where the bytes lie: what a pool on a device does otherwise ---

    def _hold(self, name: str, layer: int, nbytes: int, shape: tuple[int, int], stride: int) -> int:
        """Take memory for one cell, as rows of sentinel bytes; returns its address."""
        segment = self._allocate(nbytes)
        self._segments.append(segment)
        view = np.lib.stride_tricks.as_strided(segment.array, shape, (stride, 1))
        view[:] = SENTINEL
        self._views[name, layer] = view
        return segment.address

    def _rows(self, component: str, layer: int) -> Bytes:
        """uint8 [rows, bytes] of one cell, guards included."""
        return self._views[component, layer]

    def _put(self, component: str, layer: int, pages: Sequence[int], data: Bytes) -> None:
        self.view(component, layer)[list(pages)] = data


def _mix(words: npt.NDArray[np.uint64] | np.uint64) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        x = np.asarray(words, dtype=np.uint64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
        return mixed
