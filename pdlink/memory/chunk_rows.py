"""Owns the rows of the current chunk that belong to layers of other ranks, until the forward ends. No scratch here.

A layer's owner never sends them: each rank computes them and writes them itself. Scratch may not hold the layer when
they are written, or may lose it to another layer before it is read again, so they are kept here and put into scratch
each time the layer arrives. Memory: what was written, once; all of it goes at the end of the forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from pdlink.memory.forward import LayerKey


@dataclass(frozen=True, slots=True)
class _Write:
    slots: torch.Tensor
    fields: Mapping[str, torch.Tensor]


class ChunkRows:
    """Rows written in one forward, by layer and in order. Not thread-safe."""

    def __init__(self) -> None:
        self._writes: dict[LayerKey, list[_Write]] = {}

    def keep(self, key: LayerKey, slots: torch.Tensor, fields: Mapping[str, torch.Tensor]) -> None:
        """Remember a copy of `fields` (uint8 [n, token_bytes] each) at `slots` (int64 [n])."""
        if len(slots):
            copies = {name: rows.clone() for name, rows in fields.items()}
            self._writes.setdefault(key, []).append(_Write(slots.clone(), copies))

    def of(self, key: LayerKey) -> Iterator[tuple[torch.Tensor, Mapping[str, torch.Tensor]]]:
        """(slots, fields) of every write to the layer, oldest first."""
        for one in self._writes.get(key, ()):
            yield one.slots, one.fields

    def forget(self, key: LayerKey, slots: torch.Tensor) -> None:
        """Rows at `slots` of the layer have been replaced on its owner; what was written there no longer counts."""
        kept = []
        for one in self._writes.get(key, ()):
            stays = ~torch.isin(one.slots, slots)
            if bool(stays.any()):
                kept.append(_Write(one.slots[stays], {name: rows[stays] for name, rows in one.fields.items()}))
        self._writes[key] = kept

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for writes in self._writes.values() for one in writes for rows in one.fields.values())
