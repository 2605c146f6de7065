"""Owns page digests: made by an owner when it publishes, compared by the receiver after its pull. No policy.

A page's digest runs over that page in every region of a publication, in order, so what travels does not grow with the
number of layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from pdlink.layout.regions import MemoryKind, Region
from pdlink.transfer.descriptors import Int64Array

Digests = npt.NDArray[np.uint64]


def page_digests(regions: Sequence[Region], pages: Int64Array) -> Digests:
    """uint64 [len(pages)]: XXH3-64 of each page over all `regions`, which are host memory.

    The caller vouches that the regions are mapped, and that nobody writes these pages during the call.
    """
    hashers = [xxhash.xxh3_64() for _ in range(len(pages))]
    for region in regions:
        assert region.memory is MemoryKind.HOST, f"{region.component} layer {region.layer} is not host memory"
        for hasher, page in zip(hashers, pages.tolist(), strict=True):
            hasher.update(_host_bytes(region.base_address + page * region.page_stride, region.page_bytes))
    return np.array([hasher.intdigest() for hasher in hashers], dtype=np.uint64)


def first_difference(ours: Digests, theirs: Digests) -> int | None:
    """Position of the first page whose digests differ, or None. A missing digest is a difference."""
    short = min(len(ours), len(theirs))
    wrong = np.flatnonzero(ours[:short] != theirs[:short])
    if len(wrong):
        return int(wrong[0])
    return short if len(ours) != len(theirs) else None


def _host_bytes(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
