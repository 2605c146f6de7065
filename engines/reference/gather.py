"""Owns how rows that the ranks of a shard group computed come together in token order. It knows nothing of models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from pdlink.errors import InvalidInput
from pdlink_engines.reference.interleave import ChunkShares

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class RowGather(Protocol):
    """Rows of this rank in, uint8 [rows, nbytes]; all rows of the chunk in token order out."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...


def keep_rows(rows: torch.Tensor) -> torch.Tensor:
    """The gather of a rank that computes every token."""
    return rows


class CpGroup:
    """The context-parallel ranks of one shard group, over a torch.distributed group (gloo for tensors on CPU).

    `group` None stands for a single rank, which needs no torch.distributed; pass `dist.group.WORLD` for all
    processes. Ranks are the group's own, never the world's.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group
        self.size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        if self.rank < 0:
            raise InvalidInput("this process is no member of the given cp group")

    def row_gather(self, shares: ChunkShares) -> RowGather:
        """The gather for one chunk; every rank calls it with `shares.padded` rows."""
        if self.size == 1:
            return keep_rows
        order = torch.tensor(shares.natural_order(), dtype=torch.int64)

        def gather(rows: torch.Tensor) -> torch.Tensor:
            every = rows.new_empty((self.size * shares.padded, rows.shape[1]))
            dist.all_gather_single(every, rows.contiguous(), group=self.group)
            return every.index_select(0, order)

        return gather

    def broadcast(self, values: torch.Tensor, source: int) -> torch.Tensor:
        """Give `values` of rank `source` to all ranks, in place; every rank passes the same shape and dtype."""
        if self.size > 1:
            dist.broadcast(values, group=self.group, group_src=source)
        return values

    def minimum(self, values: list[int]) -> list[int]:
        """The least of each value over all ranks, which pass equally many."""
        if self.size == 1 or not values:
            return values
        found = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self.group)
        return [int(one) for one in found]
