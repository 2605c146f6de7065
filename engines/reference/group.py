"""Owns the collectives of this engine over one torch.distributed group, and what a failed one is called. No models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pdlink.errors import DeadlineExceeded, InvalidInput, PeerGone

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class RankGroup:
    """Ranks that work together, over a torch.distributed group (gloo for tensors on CPU).

    `group` None stands for a single rank, which needs no torch.distributed; pass `dist.group.WORLD` for all
    processes. Ranks are the group's own, never the world's. Every wait ends by the group's own timeout, and raises
    `DeadlineExceeded` or `PeerGone`; the group is of no use afterwards.
    """

    axis = "prefill"
    """What its ranks are called in messages."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group
        self.size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        if self.rank < 0:
            raise InvalidInput(f"this process is no member of the given {self.axis} group")

    def broadcast(self, values: torch.Tensor, source: int) -> torch.Tensor:
        """Give `values` of rank `source` to all ranks, in place; every rank passes the same shape and dtype."""
        if self.size > 1:
            with self.collective(f"broadcast from {self.axis} rank {source}"):
                dist.broadcast(values, group=self.group, group_src=source)
        return values

    def minimum(self, values: list[int]) -> list[int]:
        """The least of each value over all ranks, which pass equally many."""
        if self.size == 1 or not values:
            return values
        found = torch.tensor(values, dtype=torch.int64)
        with self.collective("agreement on released requests"):
            dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self.group)
        return [int(one) for one in found]

    def stack(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """[size, ...]: the `values` of every rank, which pass the same shape and dtype, in rank order."""
        every = values.new_empty((self.size, *values.shape))
        with self.collective(what):
            dist.all_gather_single(every.view(-1), values.contiguous().view(-1), group=self.group)
        return every

    def send(self, data: torch.Tensor, target: int, what: str) -> None:
        """Hand contiguous `data` to rank `target`, which must `receive` as many bytes."""
        with self.collective(what):
            dist.send(data, group=self.group, group_dst=target)

    def receive(self, data: torch.Tensor, source: int, what: str) -> torch.Tensor:
        """Fill contiguous `data` with what rank `source` sends."""
        with self.collective(what):
            dist.recv(data, group=self.group, group_src=source)
        return data

    @contextlib.contextmanager
    def collective(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as exc:
            reason = str(exc).strip().partition("\n")[0]
            where = f"{what} on {self.axis} rank {self.rank} of {self.size}"
            if "imed out" in reason or "imeout" in reason:
                raise DeadlineExceeded(f"{where}: a rank did not answer in the group's timeout: {reason}") from exc
            raise PeerGone(f"{where}: a rank has ended or given up: {reason}") from exc
