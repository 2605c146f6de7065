"""Owns a request's aux as sglang keeps it: one row of each of its host metadata buffers. It knows no field of a row.

Memory rule: the rows of a request belong to it from sglang's allocation of their index until sglang frees the index.
Prefill reads them once, when the last chunk is sent; decode writes them once, before it reports success.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pdlink.errors import InvalidInput, LayoutError


@dataclass(frozen=True, slots=True)
class AuxBuffer:
    """One host tensor of request rows; a request's aux is row i of every buffer, in this order."""

    base_address: int
    row_bytes: int
    num_rows: int


class AuxLists(Protocol):
    """The three lists of `KVArgs` that say where the metadata buffers are."""

    aux_data_ptrs: Sequence[int]
    aux_data_lens: Sequence[int]
    aux_item_lens: Sequence[int]


def buffers_of(kv_args: AuxLists) -> tuple[AuxBuffer, ...]:
    """The metadata buffers of `KVArgs`. Raises `LayoutError` for lists that cannot be rows of requests."""
    counts = {name: len(getattr(kv_args, name)) for name in ("aux_data_ptrs", "aux_data_lens", "aux_item_lens")}
    if len(set(counts.values())) > 1:
        both = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise LayoutError(f"lists of KVArgs differ in length: {both}")
    buffers: list[AuxBuffer] = []
    rows = zip(kv_args.aux_data_ptrs, kv_args.aux_data_lens, kv_args.aux_item_lens, strict=True)
    for position, (address, nbytes, row_bytes) in enumerate(rows):
        if row_bytes < 1 or nbytes < row_bytes or nbytes % row_bytes:
            raise LayoutError(f"aux_data_ptrs[{position}] is {nbytes} bytes, not whole rows of {row_bytes}")
        buffers.append(AuxBuffer(address, row_bytes, nbytes // row_bytes))
        if buffers[-1].num_rows != buffers[0].num_rows:
            raise LayoutError(
                f"aux_data_ptrs[{position}] has {buffers[-1].num_rows} rows, aux_data_ptrs[0] has "
                f"{buffers[0].num_rows}; a request is one row of each"
            )
    return tuple(buffers)


class AuxRows:
    """The metadata buffers of one rank. The engine keeps their memory mapped for as long as this is used."""

    def __init__(self, buffers: Sequence[AuxBuffer], max_bytes: int) -> None:
        """Raises `LayoutError` when a request's rows are longer than `max_bytes`, the largest aux of a request."""
        self._buffers = tuple(buffers)
        self.row_bytes = sum(one.row_bytes for one in self._buffers)
        if self.row_bytes > max_bytes:
            widest = max(range(len(self._buffers)), key=lambda index: self._buffers[index].row_bytes)
            raise LayoutError(
                f"sglang's metadata of one request is {self.row_bytes} bytes, over the limit of {max_bytes} for aux; "
                f"aux_data_ptrs[{widest}] alone has rows of {self._buffers[widest].row_bytes} bytes. Switch off the "
                "option that adds it (sampling mask, hidden states, top-k indices)"
            )

    def read(self, index: int) -> bytes:
        """Row `index` of every buffer, one after the other."""
        return b"".join(ctypes.string_at(address, nbytes) for address, nbytes in self._rows(index))

    def write(self, index: int, aux: bytes) -> None:
        """Put `aux` into row `index` of every buffer. Raises `InvalidInput`, writing nothing, unless it fits."""
        if len(aux) != self.row_bytes:
            raise InvalidInput(
                f"prefill sent {len(aux)} bytes of metadata, a row here has {self.row_bytes}; switch the options that "
                "add metadata (checksum, sampling mask, hidden states, top-k indices) alike on both servers"
            )
        start = 0
        for address, nbytes in self._rows(index):
            ctypes.memmove(address, aux[start : start + nbytes], nbytes)
            start += nbytes

    def _rows(self, index: int) -> list[tuple[int, int]]:
        if any(not 0 <= index < one.num_rows for one in self._buffers):
            raise InvalidInput(
                f"metadata row {index} is outside the {self._buffers[0].num_rows} rows of sglang's buffers"
            )
        return [(one.base_address + index * one.row_bytes, one.row_bytes) for one in self._buffers]
