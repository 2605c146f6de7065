"""Owns the endpoint blob of the nixl backend: an agent's metadata and the regions that it serves, bounded on entry."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pdlink.errors import BackendUnavailable, LayoutError, RegionError
from pdlink.layout.regions import MemoryKind, Region
from pdlink.transfer.descriptors import Int64Array

MAGIC = b"pdlink-nixl/2\n"
MAX_PACKED = 64 << 10
MAX_UNPACKED = 4 << 20
_KINDS = (MemoryKind.HOST, MemoryKind.CUDA)
"""By their number in the column `kind`."""
_COLUMNS = 6


@dataclass(frozen=True, eq=False)
class RegionTable:
    """Regions as int64 columns of one length, in order of base address. Memory kinds and devices may differ.

    nixl prepares one list for each kind of memory, and that list has the pages of its regions one after the other.
    """

    base: Int64Array
    stride: Int64Array
    page_bytes: Int64Array
    num_pages: Int64Array
    kind: Int64Array
    device: Int64Array

    @classmethod
    def of(cls, regions: Iterable[Region]) -> RegionTable:
        ordered = sorted(set(regions), key=lambda one: (one.base_address, one.num_pages, one.page_stride))
        rows = [
            (one.base_address, one.page_stride, one.page_bytes, one.num_pages, _KINDS.index(one.memory), one.device)
            for one in ordered
        ]
        return cls(*np.array(rows, dtype=np.int64).reshape(-1, _COLUMNS).T)

    @cached_property
    def kinds(self) -> tuple[MemoryKind, ...]:
        """The kinds of memory that there are."""
        return tuple(_KINDS[one] for one in np.unique(self.kind).tolist())

    @property
    def cuda_device(self) -> int | None:
        """A CUDA device that regions lie on: the first, where there are several."""
        devices = self.device[self.kind == _KINDS.index(MemoryKind.CUDA)]
        return int(devices.min()) if len(devices) else None

    @cached_property
    def first(self) -> Int64Array:
        """int64: the index of each region's page 0 in the prepared list of its kind."""
        first = np.zeros_like(self.num_pages)
        for kind in np.unique(self.kind).tolist():
            rows = self.kind == kind
            first[rows] = np.cumsum(self.num_pages[rows]) - self.num_pages[rows]
        return first

    @cached_property
    def spans(self) -> Int64Array:
        """int64 [n, 2]: first and past-the-end address."""
        return np.stack([self.base, self.base + (self.num_pages - 1) * self.stride + self.page_bytes], axis=1)

    def strided_rows(self, memory: MemoryKind) -> npt.NDArray[np.uint64]:
        """uint64 [n, 5] of (address, nbytes, device, stride, count): every page of every region in such memory."""
        columns = np.stack([self.base, self.page_bytes, self.device, self.stride, self.num_pages], axis=1)
        rows: npt.NDArray[np.uint64] = columns[self.kind == _KINDS.index(memory)].astype(np.uint64)
        return rows

    def places(self, address: Int64Array) -> tuple[Int64Array, Int64Array]:
        """(kind, device), int64 each, of addresses that lie in regions."""
        which = np.searchsorted(self.base, address, side="right") - 1
        return self.kind[which], self.device[which]

    def find(self, base: Int64Array, stride: Int64Array, page_bytes: Int64Array) -> Int64Array:
        """int64: which region each (base, stride, page_bytes) is exactly; -1: none."""
        if not len(self.base):
            return np.full(len(base), -1, dtype=np.int64)
        which = np.searchsorted(self.base, base, side="right") - 1
        same = (which >= 0) & (self.base[which] == base)
        same &= (self.stride[which] == stride) & (self.page_bytes[which] == page_bytes)
        return np.where(same, which, -1)


def memory_of(kind: int) -> MemoryKind:
    """The kind of memory that a number in a column `kind` means."""
    return _KINDS[kind]


def pack(metadata: bytes, table: RegionTable) -> bytes:
    """Raises `RegionError` when it takes more than 64 KiB."""
    header = json.dumps({"regions": len(table.base)}).encode()
    told = (table.base, table.stride, table.page_bytes, table.num_pages, table.kind, table.device)
    columns = np.stack(told).astype("<i8").tobytes()
    body = struct.pack("<II", len(header), len(columns)) + header + columns + metadata
    packed = MAGIC + zlib.compress(body, 6)
    if len(packed) > MAX_PACKED:
        raise RegionError(
            f"{len(table.base)} regions make a nixl endpoint of {len(packed)} bytes, more than {MAX_PACKED}; use "
            "fewer, larger regions"
        )
    return packed


def unpack(blob: bytes, worker_id: str) -> tuple[bytes, RegionTable]:
    """(metadata, regions) of a peer. Raises `BackendUnavailable` for anything malformed."""
    try:
        if not blob.startswith(MAGIC) or len(blob) > MAX_PACKED:
            raise ValueError(f"{len(blob)} bytes that begin with {blob[:16]!r}")
        inflate = zlib.decompressobj()
        body = inflate.decompress(blob[len(MAGIC) :], MAX_UNPACKED)
        if not inflate.eof:
            raise ValueError("it is cut short or too large")
        header_bytes, column_bytes = struct.unpack_from("<II", body)
        header = json.loads(body[8 : 8 + header_bytes])
        columns = np.frombuffer(body[8 + header_bytes :][:column_bytes], dtype="<i8").astype(np.int64)
        rows = columns.reshape(_COLUMNS, int(header["regions"])).T.tolist()
        if any(not 0 <= row[4] < len(_KINDS) for row in rows):
            raise ValueError("it has memory of an unknown kind")
        regions = [
            Region("", 0, base, stride, page_bytes, num_pages, _KINDS[kind], device)
            for base, stride, page_bytes, num_pages, kind, device in rows
        ]
        return body[8 + header_bytes + column_bytes :], RegionTable.of(regions)
    except (
        ValueError,
        KeyError,
        TypeError,
        struct.error,
        zlib.error,
        RecursionError,
        LayoutError,
        RegionError,
    ) as error:
        raise BackendUnavailable(f"{worker_id} offers a nixl endpoint that cannot be read: {error}") from error
