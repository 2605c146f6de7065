"""Owns the form of mix64 that torch computes, over memory of whichever device torch sees it on. It opens no device.

The operations are the same on every device, and write into one block of scratch memory. Loading this module loads
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import numpy as np
import torch

from pdlink.layout.regions import Region
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.digests import Digests
from pdlink.transfer.mix64 import GAMMA, MULTIPLIERS, SHIFTS, WORD_BYTES, cuts, seal

MIX_WORDS = 2 << 20
"""Words mixed at a time: 16 MiB, and as much again for what is shifted. Large enough that what a device needs to begin
an operation is the smaller part, small enough that both fit the second-level cache of a GPU such as the H200 (50 MB).
"""
KEY_WORDS = 1 << 18
"""Keys kept at a time, 2 MiB; a larger page is mixed in several goes."""
MAX_PAGES = 1 << 16
"""Page ids and sums kept at a time."""
SCRATCH_WORDS = 2 * MIX_WORDS + KEY_WORDS + 2 * MAX_PAGES
"""All of the scratch memory, 35 MiB."""

RowsOf = Callable[[Region], torch.Tensor]
"""The memory of a region as uint8 [num_pages, page_bytes]."""


class TorchMix:
    """mix64 of pages that torch can read, within `scratch` (int64 [SCRATCH_WORDS]) on their device. For one thread at a
    time.

    On a CUDA device everything is queued on the current stream, and that stream is all that is waited for.
    """

    def __init__(self, scratch: torch.Tensor, rows_of: RowsOf) -> None:
        sizes = [MIX_WORDS, MIX_WORDS, KEY_WORDS, MAX_PAGES, MAX_PAGES]
        self._mix, self._spare, self._keys, self._ids, self._sums = torch.split(scratch, sizes)
        self._rows_of = rows_of
        self._keys_from = -1

    def digests(self, regions: Sequence[Region], pages: Int64Array) -> Digests:
        """uint64 [len(regions), len(pages)]. The caller vouches as for `page_digests`."""
        found = np.zeros((len(regions), len(pages)), dtype=np.uint64)
        numbered = enumerate(regions)
        for page_bytes, same in groupby(numbered, key=lambda one: one[1].page_bytes):
            numbers = [number for number, _ in same]
            for some in cuts(len(pages), MAX_PAGES):
                sums = self._sums_of([regions[number] for number in numbers], pages[some])
                found[numbers[0] : numbers[-1] + 1, some] = seal(sums, page_bytes)
        return found

    def _sums_of(self, regions: Sequence[Region], pages: Int64Array) -> Digests:
        """uint64 [len(regions), len(pages)]: what `seal` takes, of regions whose pages are of one size."""
        ids = self._ids[: len(pages)]
        ids.copy_(torch.from_numpy(np.array(pages)))
        sources = [self._rows_of(region) for region in regions]
        words_per_page = -(-regions[0].page_bytes // WORD_BYTES)
        width = min(words_per_page, KEY_WORDS)
        found = np.zeros(len(regions) * len(pages), dtype=np.uint64)
        for some in cuts(len(found), min(MIX_WORDS // width, MAX_PAGES)):
            sums = self._sums[: some.stop - some.start]
            sums.zero_()
            for columns in cuts(words_per_page, width):
                words = self._words(len(sums), columns)
                for row, first, count, at in _pieces(some, len(pages)):
                    self._gather(sources[row], ids[first : first + count], columns, words[at : at + count])
                sums.add_(self._mixed_sums(words, columns.start))
            found[some] = sums.cpu().numpy().view(np.uint64)
        return found.reshape(len(regions), len(pages))

    def _words(self, num_pages: int, columns: slice) -> torch.Tensor:
        width = columns.stop - columns.start
        return self._mix[: num_pages * width].view(num_pages, width)

    def _gather(self, source: torch.Tensor, ids: torch.Tensor, columns: slice, words: torch.Tensor) -> None:
        """Words `columns` of pages `ids` of `source` into `words`: int64 [len(ids), width]."""
        page_bytes = source.shape[1]
        if all(one % WORD_BYTES == 0 for one in (source.data_ptr(), source.stride(0), page_bytes)):
            torch.index_select(source.view(torch.int64)[:, columns], 0, ids, out=words)
            return
        there = slice(columns.start * WORD_BYTES, min(columns.stop * WORD_BYTES, page_bytes))
        nbytes = there.stop - there.start
        packed = self._spare.view(torch.uint8)[: len(ids) * nbytes].view(len(ids), nbytes)
        torch.index_select(source[:, there], 0, ids, out=packed)
        words[:, -1] = 0
        words.view(torch.uint8)[:, :nbytes] = packed

    def _mixed_sums(self, words: torch.Tensor, first: int) -> torch.Tensor:
        """int64 [n]: the sum of each row of `words` (written over), which are words of their pages from `first` on."""
        words.bitwise_xor_(self._keys_of(first, words.shape[1]))
        self._finalise(words)
        sums = self._spare[: len(words)]
        torch.sum(words, dim=1, out=sums)
        return sums

    def _keys_of(self, first: int, width: int) -> torch.Tensor:
        if first != self._keys_from:
            torch.arange(first + 1, first + 1 + KEY_WORDS, out=self._keys)
            self._keys.mul_(_signed(GAMMA))
            self._finalise(self._keys)
            self._keys_from = first
        return self._keys[:width]

    def _finalise(self, words: torch.Tensor) -> None:
        """`mix64.mixed`. int64 multiplies as uint64 does; of a right shift, what comes in from the sign is cut off."""
        spare = self._spare[: words.numel()].view(words.shape)
        for number, shift in enumerate(SHIFTS):
            torch.bitwise_right_shift(words, shift, out=spare)
            spare.bitwise_and_((1 << (64 - shift)) - 1)
            words.bitwise_xor_(spare)
            if number < len(MULTIPLIERS):
                words.mul_(_signed(MULTIPLIERS[number]))


def _pieces(cells: slice, num_pages: int) -> Iterator[tuple[int, int, int, int]]:
    """(row, first page, number of pages, place among the cells) of the rows that cells [start, stop) of a table with
    `num_pages` columns lie in."""
    at = cells.start
    while at < cells.stop:
        row, first = divmod(at, num_pages)
        count = min(num_pages - first, cells.stop - at)
        yield row, first, count, at - cells.start
        at += count


def _signed(number: int) -> int:
    """The int64 of the same bits."""
    return number - (1 << 64) if number >> 63 else number
