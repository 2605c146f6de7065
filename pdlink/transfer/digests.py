"""Owns page digests: made by an owner when it publishes, compared by the receiver after its pull. No policy.

Each page of each (component, layer) has a digest of its own, so that a receiver can check any part of a publication and
name the page that is wrong. The owner names the kind of its digests, and both sides make that one of whatever memory
they have. A page is digested as it lies, or packed: some runs of its bytes, one after another. Where pages of the two
sides do not hold the same, each digests what both have of a page, in the order of the owner's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
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
PACKED_BYTES = 1 << 18
"""Of pages that are packed on the host at a time, where one page has no more."""
_KEPT_RUNS = 256


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
    step = max(1, PACKED_BYTES // int(runs[1].sum()))
    buffer = np.empty((min(step, len(ids)), int(runs[1].sum())), dtype=np.uint8)  # once: new memory is slow to touch
    every = np.arange(len(buffer), dtype=np.int64)
    for first in range(0, len(ids), step):
        some = ids[first : first + step]
        pack_rows(rows, some, runs, buffer)
        found[first : first + step] = _MAKERS[kind](buffer, every[: len(some)])
    return found


def pack_rows(rows: Bytes, ids: Int64Array, runs: Runs, packed: Bytes) -> None:
    """These rows, packed, into the first rows of `packed`: uint8 [at least len(ids), packed bytes]."""
    at = 0
    for offset, spacing, nbytes, count in _evenly_spaced(runs[0].tobytes(), runs[1].tobytes()):
        strides = (rows.strides[0], spacing, 1)
        there = np.lib.stride_tricks.as_strided(rows[:, offset:], (len(rows), count, nbytes), strides)
        here = packed[:, at : at + count * nbytes].reshape(len(packed), count, nbytes)
        for number, one in enumerate(ids.tolist()):
            here[number] = there[one]
        at += count * nbytes


@lru_cache(_KEPT_RUNS)
def _evenly_spaced(offsets: bytes, sizes: bytes) -> list[tuple[int, int, int, int]]:
    """The runs as few rows of runs of one size that lie equally far apart: (offset, distance, bytes of each, count).
    Those of a token's heads, or of every so manyth token, are one row in each field."""
    found: list[tuple[int, int, int, int]] = []
    for offset, nbytes in zip(*(np.frombuffer(one, dtype=np.int64).tolist() for one in (offsets, sizes)), strict=True):
        if found:
            first, spacing, size, count = found[-1]
            distance = offset - first - (count - 1) * spacing
            if size == nbytes and (count == 1 or distance == spacing):
                found[-1] = (first, distance, size, count + 1)
                continue
        found.append((offset, 0, nbytes, 1))
    return found


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
