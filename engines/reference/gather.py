"""Owns how rows that the ranks of a shard group computed come together in token order. It knows nothing of models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from pdlink.errors import DeadlineExceeded, InvalidInput, PeerGone
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
    processes. Ranks are the group's own, never the world's. Every wait ends by the group's own timeout, and raises
    `DeadlineExceeded` or `PeerGone`; the group is of no use afterwards.
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
            with self._collective(f"gather of tokens {shares.start} to {shares.end - 1}"):
                dist.all_gather_single(every, rows.contiguous(), group=self.group)
            return every.index_select(0, order)

        return gather

    def broadcast(self, values: torch.Tensor, source: int) -> torch.Tensor:
        """Give `values` of rank `source` to all ranks, in place; every rank passes the same shape and dtype."""
        if self.size > 1:
            with self._collective(f"broadcast from cp rank {source}"):
                dist.broadcast(values, group=self.group, group_src=source)
        return values

    def minimum(self, values: list[int]) -> list[int]:
        """The least of each value over all ranks, which pass equally many."""
        if self.size == 1 or not values:
            return values
        found = torch.tensor(values, dtype=torch.int64)
        with self._collective("agreement on released requests"):
            dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self.group)
        return [int(one) for one in found]

    @contextlib.contextmanager
    def _collective(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as exc:
            reason = str(exc).strip().partition("\n")[0]
            where = f"{what} on cp rank {self.rank} of {self.size}"
            if "imed out" in reason or "imeout" in reason:
                raise DeadlineExceeded(f"{where}: a rank did not answer in the group's timeout: {reason}") from exc
            raise PeerGone(f"{where}: a rank has ended or given up: {reason}") from exc
