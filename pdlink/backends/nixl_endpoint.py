"""Owns the endpoint blob of the nixl backend: an agent's metadata and the regions that it serves, bounded on entry."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pdlink.errors import BackendUnavailable, LayoutError, RegionError
from pdlink.layout.regions import MemoryKind, Region
from pdlink.transfer.descriptors import Int64Array

MAGIC = b"pdlink-nixl/1\n"
MAX_PACKED = 64 << 10
MAX_UNPACKED = 4 << 20
_COLUMNS = 4


@dataclass(frozen=True, slots=True, eq=False)
class RegionTable:
    """Regions as int64 columns of one length; `first[i]` is the index of region i's page 0 in a prepared list.

    All of them are of one memory kind and device.
    """

    base: Int64Array
    stride: Int64Array
    page_bytes: Int64Array
    num_pages: Int64Array
    memory: MemoryKind
    device: int

    @classmethod
    def of(cls, regions: Iterable[Region]) -> RegionTable:
        """In order of base address. Raises `RegionError` when they are not of one kind and device."""
        ordered = sorted(set(regions), key=lambda one: (one.base_address, one.num_pages, one.page_stride))
        kinds = {(one.memory, one.device) for one in ordered}
        if len(kinds) > 1:
            raise RegionError(f"regions of one nixl backend lie on {len(kinds)} devices; use one backend per device")
        rows = [(one.base_address, one.page_stride, one.page_bytes, one.num_pages) for one in ordered]
        columns = np.array(rows, dtype=np.int64).reshape(-1, _COLUMNS).T
        base, stride, page_bytes, num_pages = columns
        return cls(base, stride, page_bytes, num_pages, *(kinds.pop() if kinds else (MemoryKind.HOST, 0)))

    @property
    def first(self) -> Int64Array:
        return np.cumsum(self.num_pages) - self.num_pages

    @property
    def spans(self) -> Int64Array:
        """int64 [n, 2]: first and past-the-end address."""
        return np.stack([self.base, self.base + (self.num_pages - 1) * self.stride + self.page_bytes], axis=1)

    def strided_rows(self) -> np.ndarray:
        """uint64 [n, 5] of (address, nbytes, device, stride, count): every page of every region."""
        device = np.full_like(self.base, self.device)
        return np.stack([self.base, self.page_bytes, device, self.stride, self.num_pages], axis=1).astype(np.uint64)

    def find(self, base: Int64Array, stride: Int64Array, page_bytes: Int64Array) -> Int64Array:
        """int64: which region each (base, stride, page_bytes) is exactly; -1: none."""
        if not len(self.base):
            return np.full(len(base), -1, dtype=np.int64)
        which = np.searchsorted(self.base, base, side="right") - 1
        same = (which >= 0) & (self.base[which] == base)
        same &= (self.stride[which] == stride) & (self.page_bytes[which] == page_bytes)
        return np.where(same, which, -1)


def pack(metadata: bytes, table: RegionTable) -> bytes:
    """Raises `RegionError` when it takes more than 64 KiB."""
    header = json.dumps({"memory": table.memory.value, "device": table.device, "regions": len(table.base)}).encode()
    columns = np.stack([table.base, table.stride, table.page_bytes, table.num_pages]).astype("<i8").tobytes()
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
        base, stride, page_bytes, num_pages = columns.reshape(_COLUMNS, int(header["regions"]))
        memory, device = MemoryKind(header["memory"]), int(header["device"])
        regions = [
            Region("", 0, *row, memory=memory, device=device)
            for row in zip(base.tolist(), stride.tolist(), page_bytes.tolist(), num_pages.tolist(), strict=True)
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
