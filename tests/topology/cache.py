"""Owns what a request's cache holds, as the model sees it: bytes for every (component, layer, field, token, head), and
pools of ranks that are filled with it and compared with it, guard pages and all.

What a decode rank must hold is worked out here from tokens and heads alone, by none of the code that moves them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pdlink.backends.shm import Segment
from pdlink.layout import CacheLayout, Component, OwnedLayers, Part, Region
from pdlink.layout.regions import MemoryKind
from pdlink.testing.pattern import SENTINEL, Bytes, page_patterns

GUARD_PAGES = 1
PADDING = 0x55
"""Of source pages, where no field lies."""


@dataclass
class Pool:
    """The regions of one rank in one segment, all sentinel bytes, with a guard page on either side of each.

    They are in host memory, or count as memory of a device, as `memory`, `device` and `allocate` say. `upload` and
    `download` are for pools whose memory is elsewhere in truth."""

    layout: CacheLayout
    owned: OwnedLayers
    num_pages: int
    gap: int = 0
    regions: tuple[Region, ...] = ()
    rows: dict[tuple[str, int], Bytes] = field(default_factory=dict)
    """(component, layer) -> uint8 [guard + pages + guard, stride]."""
    segment: Segment | None = None
    memory: MemoryKind = MemoryKind.HOST
    device: int = 0
    allocate: Callable[[int], Segment] = Segment.create

    def __post_init__(self) -> None:
        cells = [(name, layer) for name, ids in self.owned.items() for layer in ids]
        strides = [self.layout.component(name).page_bytes + self.gap for name, _ in cells]
        num_rows = self.num_pages + 2 * GUARD_PAGES
        if not cells:
            return
        self.segment = self.allocate(num_rows * sum(strides))
        self.segment.array[:] = SENTINEL
        at = 0
        for (name, layer), stride in zip(cells, strides, strict=True):
            self.rows[name, layer] = self.segment.array[at : at + num_rows * stride].reshape(num_rows, stride)
            base, nbytes = self.segment.address + at + GUARD_PAGES * stride, self.layout.component(name).page_bytes
            place = (self.memory, self.device)
            self.regions += (Region(name, layer, base, stride, nbytes, self.num_pages, *place),)
            at += num_rows * stride

    def upload(self) -> None:
        """What was written to `rows` is in the regions from now on."""

    def download(self) -> None:
        """`rows` shows what is in the regions now."""

    def close(self) -> None:
        self.rows.clear()
        if self.segment:
            self.segment.close()


@dataclass(frozen=True)
class Truth:
    """The cache of one request: tokens of `num_pages` page positions, all heads of the model."""

    transfer_id: str
    num_pages: Mapping[str, int]
    """Page group -> positions."""

    def tokens(self, component: Component, layer: int, name: str) -> Bytes:
        """uint8 [tokens, heads, bytes] of one field."""
        one = component.field(name)
        heads = component.model_heads if component.is_by_heads else one.num_heads
        positions = range(self.num_pages[component.page_group])
        nbytes = component.page_size * heads * one.bytes_per_token
        made = page_patterns(self.transfer_id, f"{component.name}.{name}", layer, positions, nbytes)
        return made.reshape(len(positions) * component.page_size, heads, one.bytes_per_token)

    def fill(self, pool: Pool, parts: Mapping[str, Part], pages: Mapping[str, Sequence[int]]) -> None:
        """Write a prefill rank's pages: it has all tokens of its heads."""
        for (name, layer), rows in pool.rows.items():
            component = pool.layout.component(name)
            ids = np.array(pages[component.page_group], dtype=np.int64) + GUARD_PAGES
            rows[ids, : component.page_bytes] = PADDING
            for one in component.fields:
                values = self._held(component, layer, one.name, parts[name])
                values = values.reshape(len(ids), component.page_size, *values.shape[1:])
                where = one.starts(component.page_size)[:, :, None] + np.arange(one.bytes_per_token)
                rows[ids[:, None, None, None], where[None]] = values

    def _held(self, component: Component, layer: int, name: str, part: Part) -> Bytes:
        values = self.tokens(component, layer, name)
        if not component.is_by_heads:
            return values
        mine = part.heads(component.model_heads)
        return values[:, mine.start : mine.stop]


@dataclass(frozen=True)
class Landed:
    """What a decode rank's pool must hold after requests: sentinel bytes, and what each request has put there."""

    pool: Pool

    @cached_property
    def image(self) -> dict[tuple[str, int], Bytes]:
        return {cell: np.full_like(rows, SENTINEL) for cell, rows in self.pool.rows.items()}

    def add(
        self,
        truth: Truth,
        parts: Mapping[str, Part],
        pages: Mapping[str, Sequence[int]],
        first_token: Mapping[str, int],
        whole: Mapping[str, bool],
    ) -> None:
        """`pages` of each group are for tokens from `first_token` on; `whole` says of which components padding comes
        along; components that it does not name are left alone."""
        for (name, layer), rows in self.image.items():
            if name not in whole:
                continue
            component = self.pool.layout.component(name)
            part, size, group = parts[name], component.page_size, component.page_group
            first, end = first_token[group], truth.num_pages[group] * size
            tokens = np.arange(first, end, dtype=np.int64)
            tokens = tokens[tokens % part.token_count == part.token_index]
            slots = (tokens - first) // part.token_count
            ids = np.array(pages[group], dtype=np.int64) + GUARD_PAGES
            if whole[name]:
                rows[ids, : component.page_bytes] = PADDING
            for one in component.fields:
                values = truth._held(component, layer, one.name, part)[tokens]
                starts = one.starts(size)[slots % size]
                where = starts[:, :, None] + np.arange(one.bytes_per_token)
                rows[ids[slots // size][:, None, None], where] = values

    def find_wrong(self) -> str:
        """The first byte that is not as it must be, or nothing."""
        for cell, wanted in self.image.items():
            found = self.pool.rows[cell]
            if not np.array_equal(found, wanted):
                page, offset = (int(one) for one in np.argwhere(found != wanted)[0])
                there = f"{int(found[page, offset]):#x}, not {int(wanted[page, offset]):#x}"
                return f"{cell[0]!r} layer {cell[1]}, page {page - GUARD_PAGES}, byte {offset} holds {there}"
        return ""
