"""Owns page digests: made by an owner when it publishes, compared by the receiver after its pull. No policy.

Each page of each (component, layer) has a digest of its own, so that a receiver can check any part of a publication and
name the page that is wrong. The owner names the kind of its digests, and both sides make that one of whatever memory
they have.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

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

Digester: TypeAlias = Callable[[DigestKind, Sequence[Region], Int64Array], Digests]
"""(kind, regions, pages) -> uint64 [regions, pages]. As `page_digests`, wherever the regions lie."""


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
    kind: DigestKind, regions: Sequence[Region], pages: Int64Array, read: PageReader = host_pages
) -> Digests:
    """uint64 [len(regions), len(pages)]: a digest of each page of each region, made on the host.

    The caller vouches that the regions are mapped, and that nobody writes these pages during the call.
    """
    digests = np.zeros((len(regions), len(pages)), dtype=np.uint64)
    for row, region in enumerate(regions):
        done = 0
        for rows, ids in read(region, pages):
            digests[row, done : done + len(ids)] = _MAKERS[kind](rows, ids)
            done += len(ids)
        assert done == len(pages), f"{done} of {len(pages)} pages were read"
    return digests


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
