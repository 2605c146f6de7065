"""Owns how a pull is cut into posts: index arrays into prepared lists, bounded in size and number. It posts none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdlink.backends.nixl_endpoint import RegionTable
from pdlink.transfer.descriptors import GroupMove, Int64Array, PullBatch

MAX_BYTES = 64 << 20
MAX_DESCRIPTORS = 16_384
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Indexed:
    """Pages of prepared regions: int32 indices of one length into the own list and into the peer's."""

    own: Int32Array
    theirs: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class Plain:
    """Ranges that are no whole pages of a region, as addresses: uint64 [n, 3] of (address, nbytes, device)."""

    own: npt.NDArray[np.uint64]
    theirs: npt.NDArray[np.uint64]


def pieces(batch: PullBatch, own: RegionTable, theirs: RegionTable) -> Iterator[Indexed | Plain]:
    """Everything that the batch moves, in posts of at most `MAX_BYTES` and `MAX_DESCRIPTORS`, made one at a time.

    Neighbouring pages get neighbouring indices, which nixl merges. Ranges must have been checked.
    """
    for move in batch.moves:
        layers = move.layers
        to = own.find(layers.destination_base, layers.destination_stride, layers.page_bytes)
        at = theirs.find(layers.source_base, layers.source_stride, layers.page_bytes)
        whole = (to >= 0) & (at >= 0)
        if bool(np.any(whole)):
            yield from _indexed(move, own.first[to[whole]], theirs.first[at[whole]], layers.page_bytes[whole])
        if not bool(np.all(whole)):
            rest = GroupMove(move.group, move.runs, layers.take(np.flatnonzero(~whole)))
            yield from _plain(PullBatch(batch.worker_id, (rest,)), own.device, theirs.device)


def _indexed(move: GroupMove, own: Int64Array, theirs: Int64Array, page_bytes: Int64Array) -> Iterator[Indexed]:
    source, destination = move.runs.source_pages(), move.runs.destination_pages()
    at_once = int(max(1, min(MAX_DESCRIPTORS, MAX_BYTES // int(page_bytes.max()))))
    num_layers = max(1, at_once // max(1, len(source)))
    for layer in range(0, len(own), num_layers):
        some = slice(layer, layer + num_layers)
        for page in range(0, len(source), at_once):
            part = slice(page, page + at_once)
            yield Indexed(
                (own[some, None] + destination[None, part]).reshape(-1).astype(np.int32),
                (theirs[some, None] + source[None, part]).reshape(-1).astype(np.int32),
            )


def _plain(batch: PullBatch, own_device: int, their_device: int) -> Iterator[Plain]:
    for piece in batch.expand(MAX_DESCRIPTORS):
        held = 0
        for end in [*_cuts(piece.nbytes), len(piece)]:
            part = slice(held, end)
            yield Plain(
                _rows(piece.destination[part], piece.nbytes[part], own_device),
                _rows(piece.source[part], piece.nbytes[part], their_device),
            )
            held = end


def _cuts(nbytes: Int64Array) -> list[int]:
    """Where to cut so that each part has at most `MAX_BYTES`, one longer row aside."""
    cuts, held = [], 0
    for row, size in enumerate(nbytes.tolist()):
        if held and held + size > MAX_BYTES:
            cuts.append(row)
            held = 0
        held += size
    return cuts


def _rows(address: Int64Array, nbytes: Int64Array, device: int) -> npt.NDArray[np.uint64]:
    return np.stack([address, nbytes, np.full_like(address, device)], axis=1).astype(np.uint64)
