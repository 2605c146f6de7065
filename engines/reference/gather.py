"""Owns how rows that the ranks of a shard group computed come together in token order. It knows nothing of models."""

from __future__ import annotations

from typing import Protocol

import torch

from pdlink_engines.reference.group import RankGroup
from pdlink_engines.reference.interleave import ChunkShares


class RowGather(Protocol):
    """Rows of this rank in, uint8 [rows, nbytes]; all rows of the chunk in token order out."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...


def keep_rows(rows: torch.Tensor) -> torch.Tensor:
    """The gather of a rank that computes every token."""
    return rows


class CpGroup(RankGroup):
    """The context-parallel ranks of one shard group."""

    axis = "cp"

    def row_gather(self, shares: ChunkShares) -> RowGather:
        """The gather for one chunk; every rank calls it with `shares.padded` rows."""
        if self.size == 1:
            return keep_rows
        order = torch.tensor(shares.natural_order(), dtype=torch.int64)

        def gather(rows: torch.Tensor) -> torch.Tensor:
            every = self.stack(rows, f"gather of tokens {shares.start} to {shares.end - 1}")
            return every.view(-1, rows.shape[1]).index_select(0, order)

        return gather
