"""Owns the bytes that `pdlink bench transfer` moves: how much of what shape, and their pattern. It moves none.

The raw scripts, which know nothing of pdlink, load this file too, so it imports nothing of pdlink. Memory is that of
the host, seen through numpy, or of a device, seen through torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

WORD_BYTES = 8
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shape:
    """`num_pages` pages in each of `num_layers` layers of a pool.

    Scattered ones are drawn from a pool twice as large, so that no page has a neighbour; others fill their pool.
    Only layers from `first_layer` up to `stop_layer` (0: the last) are filled, moved and checked: those of one owner.
    """

    page_bytes: int
    num_pages: int
    num_layers: int
    scattered: bool
    first_layer: int = 0
    stop_layer: int = 0

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.stop_layer or self.num_layers)

    @property
    def start_bytes(self) -> int:
        """Where the first of `layers` begins in the pool."""
        return self.first_layer * self.layer_bytes

    @property
    def pool_pages(self) -> int:
        return 2 * self.num_pages if self.scattered else self.num_pages

    @property
    def nbytes(self) -> int:
        """What a pull moves."""
        return self.page_bytes * self.num_pages * len(self.layers)

    @property
    def layer_bytes(self) -> int:
        """A whole layer of the pool."""
        return self.page_bytes * self.pool_pages

    @property
    def block_bytes(self) -> int:
        """The whole pool, layer after layer."""
        return self.layer_bytes * self.num_layers

    def pages(self, warm: bool = False) -> tuple[Int64Array, Int64Array]:
        """int64 [num_pages] each: pages on the owner, in order, and where each of them goes.

        `warm`: those of the read that warms up, which are others where the pool has others.
        """
        if not self.scattered:
            every = np.arange(self.num_pages, dtype=np.int64)
            return every, every
        apart = 2 * np.arange(self.num_pages, dtype=np.int64) + int(warm)
        return apart, np.random.default_rng(0).permutation(apart)

    def rows(self, warm: bool = False) -> tuple[Int64Array, Int64Array, Int64Array]:
        """(offset in the owner's block, offset in the reader's, bytes) of each range, neighbours merged."""
        layer = np.array(self.layers, dtype=np.int64)[:, None] * self.layer_bytes
        if not self.scattered:
            start = layer.reshape(-1)
            return start, start, np.full(len(self.layers), self.layer_bytes, dtype=np.int64)
        source, target = self.pages(warm)
        starts = [(layer + pages[None, :] * self.page_bytes).reshape(-1) for pages in (source, target)]
        return starts[0], starts[1], np.full(len(starts[0]), self.page_bytes, dtype=np.int64)

    def layer_rows(self, warm: bool = False) -> tuple[Int64Array, Int64Array, Int64Array]:
        """As `rows`: as many pages of each layer, but the first ones, so that they are one range a layer.

        Where pages are scattered no range touches the next one, which a library might merge with it.
        """
        nbytes = self.page_bytes * self.num_pages
        start = np.array(self.layers, dtype=np.int64) * self.layer_bytes
        start = start + (nbytes if warm and self.scattered else 0)
        return start, start, np.full(len(self.layers), nbytes, dtype=np.int64)

    def range_rows(self, num_ranges: int, warm: bool = False) -> tuple[Int64Array, Int64Array, Int64Array]:
        """As `rows`: `nbytes` bytes of the block from `start_bytes` on, in `num_ranges` ranges."""
        words = self.nbytes // WORD_BYTES
        bounds = np.arange(num_ranges + 1, dtype=np.int64) * words // num_ranges * WORD_BYTES
        bounds = bounds + self.start_bytes + (self.nbytes if warm and self.scattered else 0)
        return bounds[:-1], bounds[:-1], np.diff(bounds)


class Block:
    """A pool's memory as words, each of which tells its place and the number of the fill."""

    def __init__(self, words: Any, shape: Shape, device: str = "") -> None:
        """`words` are int64, a numpy array or a torch tensor on `device`, of `block_bytes` in all."""
        self._words = words.reshape(shape.num_layers, shape.pool_pages, shape.page_bytes // WORD_BYTES)
        self._flat = self._words.reshape(-1)
        self._shape = shape
        self._device = device

    def fill(self, number: int) -> None:
        """Write fill `number` into every layer of the shape; on a device it is there when this returns."""
        size = len(self._flat)
        start = number * size
        step = size // self._shape.num_layers
        for first in (layer * step for layer in self._shape.layers):
            self._flat[first : first + step] = self._arange(start + first, start + first + step)
        self._wait()

    def wipe(self) -> None:
        """Write what no fill has all over, so that every read finds its destination equally warm, and is checked."""
        self._flat[:] = -1
        self._wait()

    def damage(self) -> None:
        """Change one word of the first page that moves."""
        self._flat[self._shape.start_bytes // WORD_BYTES] ^= 1
        self._wait()

    def find_wrong_page(self, number: int) -> str:
        """The first layer and page, here, that is not what the owner's pool has in fill `number`; empty: none."""
        return self._find_wrong(number, *self._shape.pages())

    def find_wrong_layer(self, number: int) -> str:
        """The same for the first pages of each layer, moved to where they were."""
        first = np.arange(self._shape.num_pages, dtype=np.int64)
        return self._find_wrong(number, first, first)

    def find_wrong_range(self, number: int) -> str:
        """The same for the first `nbytes` bytes, moved to where they were."""
        size, base = self._shape.nbytes // WORD_BYTES, self._shape.start_bytes // WORD_BYTES
        step = -(-size // len(self._shape.layers))
        for first in range(base, base + size, step):
            stop = min(first + step, base + size)
            start = number * len(self._flat)
            if not bool((self._flat[first:stop] == self._arange(start + first, start + stop)).all()):
                return f"bytes {first * WORD_BYTES}..{stop * WORD_BYTES}"
        return ""

    def _find_wrong(self, number: int, source_pages: Int64Array, target_pages: Int64Array) -> str:
        source, target = (self._index(one) for one in (source_pages, target_pages))
        num_words = self._shape.page_bytes // WORD_BYTES
        within = self._arange(0, num_words)[None, :]
        for layer in self._shape.layers:
            first = number * len(self._flat) + (layer * self._shape.pool_pages + source) * num_words
            same = (self._words[layer][target] == first[:, None] + within).all(1).tolist()
            if not all(same):
                return f"layer {layer}, page {int(target[same.index(False)])}"
        return ""

    def _arange(self, start: int, stop: int) -> Any:
        if not self._device:
            return np.arange(start, stop, dtype=np.int64)
        import torch

        return torch.arange(start, stop, dtype=torch.int64, device=self._device)

    def _index(self, pages: Int64Array) -> Any:
        if not self._device:
            return pages
        import torch

        return torch.from_numpy(pages).to(self._device)

    def _wait(self) -> None:
        if self._device:
            import torch

            torch.cuda.synchronize(self._device)
