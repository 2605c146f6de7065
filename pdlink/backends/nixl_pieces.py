"""Owns how a pull is cut into posts: index arrays into prepared lists, bounded in size and number. It posts none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdlink.backends.nixl_endpoint import RegionTable, memory_of
from pdlink.backends.ranges import MAX_KNOWN, RangeCheck
from pdlink.layout.regions import MemoryKind
from pdlink.transfer.descriptors import GroupMove, Int64Array, LayerTable, PullBatch
from pdlink.transfer.kept import Kept

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


@dataclass(frozen=True, slots=True, eq=False)
class _Alike:
    """Layers that lie in one kind of memory on either side. Those whose pages are whole pages of a region on both have
    the indices of their page 0 in the prepared lists, int64 each, and their page bytes; the others are `rest`."""

    layers: LayerTable
    own_memory: MemoryKind
    their_memory: MemoryKind
    own_first: Int64Array
    their_first: Int64Array
    page_bytes: Int64Array
    rest: LayerTable


class PieceCutter:
    """What pulls from one peer are cut into. Layers that come again are looked up once. Threads may share it."""

    def __init__(self, theirs: RegionTable, worker_id: str) -> None:
        self._theirs = theirs
        self._worker_id = worker_id
        self._ranges = RangeCheck()
        self._known: Kept[LayerTable, tuple[RegionTable, tuple[_Alike, ...]]] = Kept(MAX_KNOWN)

    def pieces(self, batch: PullBatch, own: RegionTable) -> Iterator[Indexed | Plain]:
        """Everything that the batch moves, in posts bounded in bytes and descriptors, made one at a time.

        Neighbouring pages get neighbouring indices, which nixl merges. Raises `RegionError` at once for what lies in no
        region on either side.
        """
        for move in batch.moves:
            self._ranges.check(move, self._theirs.spans, self._worker_id, own.spans)
        return self._cut(batch, own)

    def _cut(self, batch: PullBatch, own: RegionTable) -> Iterator[Indexed | Plain]:
        for move in batch.moves:
            known = self._known.get(move.layers)
            if known is None or known[0] is not own:
                known = self._known.put(move.layers, (own, tuple(_alike(move.layers, own, self._theirs))))
            for one in known[1]:
                yield from _between(GroupMove(move.group, move.runs, one.layers), one, own, self._theirs)


def _alike(layers: LayerTable, own: RegionTable, theirs: RegionTable) -> Iterator[_Alike]:
    to_kind, _ = own.places(layers.destination_base)
    at_kind, _ = theirs.places(layers.source_base)
    for to_memory, at_memory in sorted(set(zip(to_kind.tolist(), at_kind.tolist(), strict=True))):
        some = layers.take(np.flatnonzero((to_kind == to_memory) & (at_kind == at_memory)))
        to = own.find(some.destination_base, some.destination_stride, some.page_bytes)
        at = theirs.find(some.source_base, some.source_stride, some.page_bytes)
        whole = (to >= 0) & (at >= 0)
        firsts = (own.first[to[whole]], theirs.first[at[whole]])
        rest = some.take(np.flatnonzero(~whole))
        yield _Alike(some, memory_of(to_memory), memory_of(at_memory), *firsts, some.page_bytes[whole], rest)


def _between(move: GroupMove, alike: _Alike, own: RegionTable, theirs: RegionTable) -> Iterator[Indexed | Plain]:
    memory = alike.own_memory, alike.their_memory
    most, most_rows = MAX_BYTES, MAX_DESCRIPTORS
    if alike.own_memory is alike.their_memory is MemoryKind.CUDA:
        merged = move.runs.num_pages * move.layers.num_layers // max(1, move.num_descriptors)  # by nixl, of each copy
        most, most_rows = MAX_DEVICE_BYTES, min(MAX_DESCRIPTORS, MAX_DEVICE_DESCRIPTORS * max(1, merged))
    if len(alike.page_bytes):
        columns = (alike.own_first, alike.their_first, alike.page_bytes)
        for to_pages, at_pages in _indexed(move, *columns, most, most_rows):
            yield Indexed(to_pages, at_pages, *memory)
    if alike.rest.num_layers:
        rest = GroupMove(move.group, move.runs, alike.rest)
        for piece in PullBatch("", (rest,)).expand(most_rows):
            for part in _parts(piece.nbytes, most):
                to_rows = _rows(piece.destination[part], piece.nbytes[part], own)
                yield Plain(to_rows, _rows(piece.source[part], piece.nbytes[part], theirs), *memory)


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
