"""Owns page digests: made by an owner when it publishes, compared by the receiver after its pull. No policy.

Each page of each (component, layer) has a digest of its own, so that a receiver can check any part of a publication and
name the page that is wrong. The owner names the kind of its digests, and both sides make that one of whatever memory
they have. A page is digested as it lies, or packed: some runs of its bytes, one after another. Where pages of the two
sides do not hold the same, each digests what both have of a page, in the order of the owner's.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from pdlink.layout.regions import MemoryKind, Region
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.mix64 import mix64

Digests = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]


class DigestKind(StrEnum):
    """How digests are made. The names travel, so they stay."""

    XXH3_64 = "xxh3-64"
    """XXH3 with 64 bits (seed 0): the quickest over host memory, about 10 GB/s on one core."""
    MIX64 = "mix64"
    """See `transfer/mix64.py`: made where pages lie on a device; about 2 GB/s on one core."""

    @classmethod
    def named(cls, name: str) -> DigestKind | None:
        """The kind of that name, if this version knows it."""
        return next((one for one in cls if one.value == name), None)


@dataclass(frozen=True, slots=True, eq=False)
class DigestTable:
    """Digests of one kind: uint64 [(component, layer), page]. `kind` is its name, and may be of a later version."""

    kind: str
    values: Digests

    def part(self, rows: Sequence[int], pages: slice) -> DigestTable:
        return DigestTable(self.kind, self.values[rows, pages])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DigestTable):
            return NotImplemented
        return self.kind == other.kind and bool(np.array_equal(self.values, other.values))


PageReader: TypeAlias = Callable[[Region, Int64Array], Iterable[tuple[Bytes, Int64Array]]]
"""(region, pages) -> some at a time and in their order, the bytes of the pages: rows of a uint8 [m, page_bytes], and
which of them, int64 [k]. Rows are valid until the next are asked for."""

Runs: TypeAlias = tuple[Int64Array, Int64Array]
"""(offsets, sizes) in bytes, int64 [n] each: what is packed of a page, in this order."""
PACKED_BYTES = 1 << 20
"""Of pages that are packed on the host at a time, where one page has no more."""


class Digester(Protocol):
    """Makes digests as `page_digests`, wherever the regions lie."""

    def __call__(
        self, kind: DigestKind, regions: Sequence[Region], pages: Int64Array, *, runs: Sequence[Runs | None] = ()
    ) -> Digests:
        """uint64 [regions, pages]."""


def host_pages(region: Region, pages: Int64Array) -> Iterator[tuple[Bytes, Int64Array]]:
    """A region in host memory, in place; all of `pages` at once."""
    assert region.memory is MemoryKind.HOST, f"{region.component} layer {region.layer} is not host memory"
    yield host_rows(region), pages


def host_rows(region: Region) -> Bytes:
    """uint8 [num_pages, page_bytes] over the memory at the addresses of a region, which must be of the host."""
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * region.nbytes).from_address(region.base_address))
    shape = (region.num_pages, region.page_bytes)
    return np.lib.stride_tricks.as_strided(memory, shape, (region.page_stride, 1))


def page_digests(
    kind: DigestKind,
    regions: Sequence[Region],
    pages: Int64Array,
    read: PageReader = host_pages,
    *,
    runs: Sequence[Runs | None] = (),
) -> Digests:
    """uint64 [len(regions), len(pages)]: a digest of each page of each region, made on the host.

    `runs` says of each region what is packed of its pages: all of a page where there is None, or no `runs`. The caller
    vouches that the regions are mapped, and that nobody writes these pages during the call.
    """
    digests = np.zeros((len(regions), len(pages)), dtype=np.uint64)
    for row, region in enumerate(regions):
        packed, done = runs[row] if runs else None, 0
        for rows, ids in read(region, pages):
            digests[row, done : done + len(ids)] = _made(kind, rows, ids, packed)
            done += len(ids)
        assert done == len(pages), f"{done} of {len(pages)} pages were read"
    return digests


def _made(kind: DigestKind, rows: Bytes, ids: Int64Array, runs: Runs | None) -> Digests:
    if runs is None:
        return _MAKERS[kind](rows, ids)
    found = np.zeros(len(ids), dtype=np.uint64)
    step = max(1, PACKED_BYTES // max(1, int(runs[1].sum())))
    for first in range(0, len(ids), step):
        packed = packed_rows(rows, ids[first : first + step], runs)
        found[first : first + step] = _MAKERS[kind](packed, np.arange(len(packed), dtype=np.int64))
    return found


def packed_rows(rows: Bytes, ids: Int64Array, runs: Runs) -> Bytes:
    """uint8 [len(ids), packed bytes]: these rows, packed."""
    offsets, sizes = runs
    word = math.gcd(8, *offsets.tolist(), *sizes.tolist())
    counts = sizes // word
    before = np.cumsum(counts) - counts
    columns = np.repeat(offsets // word - before, counts) + np.arange(int(counts.sum()), dtype=np.int64)
    words = rows[:, : rows.shape[1] // word * word].view(f"<u{word}")[ids]
    packed: Bytes = np.take(words, columns, axis=1).view(np.uint8)
    return packed


def _xxh3_64(rows: Bytes, ids: Int64Array) -> Digests:
    return np.array([xxhash.xxh3_64_intdigest(rows[one]) for one in ids.tolist()], dtype=np.uint64)


_MAKERS: dict[DigestKind, Callable[[Bytes, Int64Array], Digests]] = {
    DigestKind.XXH3_64: _xxh3_64,
    DigestKind.MIX64: mix64,
}


def cells_in_order(layers: Mapping[str, Iterable[int]]) -> list[tuple[str, int]]:
    """(component, layer) in the order of a publication's digests, the same on both sides."""
    return [(component, layer) for component in sorted(layers) for layer in sorted(layers[component])]


def by_component(cells: Iterable[tuple[str, int]]) -> dict[str, tuple[int, ...]]:
    """The layers of each component, as frames name them, of cells in order."""
    layers: dict[str, list[int]] = {}
    for component, layer in cells:
        layers.setdefault(component, []).append(layer)
    return {component: tuple(ids) for component, ids in layers.items()}


def first_difference(ours: Digests, theirs: Digests) -> tuple[int, int] | None:
    """(row, column) of the first digest that differs, or None. Both have one shape."""
    wrong = np.argwhere(ours != theirs)
    return (int(wrong[0][0]), int(wrong[0][1])) if len(wrong) else None
