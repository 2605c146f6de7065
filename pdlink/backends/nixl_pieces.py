"""Owns how a pull is cut into posts: index arrays into prepared lists, bounded in size and number. It posts none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdlink.backends.nixl_endpoint import RegionTable, memory_of
from pdlink.layout.regions import MemoryKind
from pdlink.transfer.descriptors import GroupMove, Int64Array, PullBatch

MAX_BYTES = 64 << 20
MAX_DESCRIPTORS = 16_384
MAX_DEVICE_BYTES, MAX_DEVICE_DESCRIPTORS = 256 << 20, 1024
"""Between CUDA devices: as long on the wire as the above between hosts, or shorter; and as many copies as the driver
queues without making their poster wait. Two H200 move scattered pages of 41,984 B at 10.9 GB/s so, and in longer posts
at 8.5 to 9.7."""
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Indexed:
    """Pages of prepared regions: int32 indices of one length into the own list and into the peer's, each of one kind of
    memory."""

    own: Int32Array
    theirs: Int32Array
    own_memory: MemoryKind
    their_memory: MemoryKind


@dataclass(frozen=True, slots=True, eq=False)
class Plain:
    """Ranges that are no whole pages of a region, as addresses: uint64 [n, 3] of (address, nbytes, device), on either
    side in one kind of memory."""

    own: npt.NDArray[np.uint64]
    theirs: npt.NDArray[np.uint64]
    own_memory: MemoryKind
    their_memory: MemoryKind


def pieces(batch: PullBatch, own: RegionTable, theirs: RegionTable) -> Iterator[Indexed | Plain]:
    """Everything that the batch moves, in posts bounded in bytes and descriptors, made one at a time.

    Neighbouring pages get neighbouring indices, which nixl merges. Ranges must have been checked.
    """
    for move in batch.moves:
        to_kind, _ = own.places(move.layers.destination_base)
        at_kind, _ = theirs.places(move.layers.source_base)
        for to, at in sorted(set(zip(to_kind.tolist(), at_kind.tolist(), strict=True))):
            alike = move.layers.take(np.flatnonzero((to_kind == to) & (at_kind == at)))
            yield from _between(GroupMove(move.group, move.runs, alike), own, theirs, memory_of(to), memory_of(at))


def _between(
    move: GroupMove, own: RegionTable, theirs: RegionTable, own_memory: MemoryKind, their_memory: MemoryKind
) -> Iterator[Indexed | Plain]:
    layers = move.layers
    most, most_rows = MAX_BYTES, MAX_DESCRIPTORS
    if own_memory is their_memory is MemoryKind.CUDA:
        merged = move.runs.num_pages * layers.num_layers // max(1, move.num_descriptors)  # by nixl, of each such copy
        most, most_rows = MAX_DEVICE_BYTES, min(MAX_DESCRIPTORS, MAX_DEVICE_DESCRIPTORS * max(1, merged))
    to = own.find(layers.destination_base, layers.destination_stride, layers.page_bytes)
    at = theirs.find(layers.source_base, layers.source_stride, layers.page_bytes)
    whole = (to >= 0) & (at >= 0)
    if bool(np.any(whole)):
        firsts = (own.first[to[whole]], theirs.first[at[whole]])
        for to_pages, at_pages in _indexed(move, *firsts, layers.page_bytes[whole], most, most_rows):
            yield Indexed(to_pages, at_pages, own_memory, their_memory)
    if not bool(np.all(whole)):
        rest = GroupMove(move.group, move.runs, layers.take(np.flatnonzero(~whole)))
        for piece in PullBatch("", (rest,)).expand(most_rows):
            for part in _parts(piece.nbytes, most):
                to_rows = _rows(piece.destination[part], piece.nbytes[part], own)
                yield Plain(to_rows, _rows(piece.source[part], piece.nbytes[part], theirs), own_memory, their_memory)


def _indexed(
    move: GroupMove, own: Int64Array, theirs: Int64Array, page_bytes: Int64Array, most: int, most_rows: int
) -> Iterator[tuple[Int32Array, Int32Array]]:
    source, destination = move.runs.source_pages(), move.runs.destination_pages()
    at_once = int(max(1, min(most_rows, most // int(page_bytes.max()))))
    num_layers = max(1, at_once // max(1, len(source)))
    for layer in range(0, len(own), num_layers):
        some = slice(layer, layer + num_layers)
        for page in range(0, len(source), at_once):
            part = slice(page, page + at_once)
            yield (
                (own[some, None] + destination[None, part]).reshape(-1).astype(np.int32),
                (theirs[some, None] + source[None, part]).reshape(-1).astype(np.int32),
            )


def _parts(nbytes: Int64Array, most: int) -> Iterator[slice]:
    """Cuts so that each part has at most `most` bytes, one longer row aside."""
    first, held = 0, 0
    for row, size in enumerate(nbytes.tolist()):
        if held and held + size > most:
            yield slice(first, row)
            first, held = row, 0
        held += size
    yield slice(first, len(nbytes))


def _rows(address: Int64Array, nbytes: Int64Array, table: RegionTable) -> npt.NDArray[np.uint64]:
    _, device = table.places(address)
    return np.stack([address, nbytes, device], axis=1).astype(np.uint64)
