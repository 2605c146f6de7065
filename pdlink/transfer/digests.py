"""Owns page digests: made by an owner when it publishes, compared by the receiver after its pull. No policy.

Each page of each (component, layer) has a digest of its own, so that a receiver can check any part of a publication and
name the page that is wrong.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from pdlink.layout.regions import MemoryKind, Region
from pdlink.transfer.descriptors import Int64Array

Digests = npt.NDArray[np.uint64]


def page_digests(regions: Sequence[Region], pages: Int64Array) -> Digests:
    """uint64 [len(regions), len(pages)]: XXH3-64 of each page of each region, which are host memory.

    The caller vouches that the regions are mapped, and that nobody writes these pages during the call.
    """
    digests = np.zeros((len(regions), len(pages)), dtype=np.uint64)
    for row, region in enumerate(regions):
        assert region.memory is MemoryKind.HOST, f"{region.component} layer {region.layer} is not host memory"
        addresses = region.base_address + pages * region.page_stride
        for column, address in enumerate(addresses.tolist()):
            digests[row, column] = xxhash.xxh3_64_intdigest(_host_bytes(address, region.page_bytes))
    return digests


def cells_in_order(layers: Mapping[str, Iterable[int]]) -> list[tuple[str, int]]:
    """(component, layer) in the order of a publication's digests, the same on both sides."""
    return [(component, layer) for component in sorted(layers) for layer in sorted(layers[component])]


def first_difference(ours: Digests, theirs: Digests) -> tuple[int, int] | None:
    """(row, column) of the first digest that differs, or None. Both have one shape."""
    wrong = np.argwhere(ours != theirs)
    return (int(wrong[0][0]), int(wrong[0][1])) if len(wrong) else None


def _host_bytes(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
