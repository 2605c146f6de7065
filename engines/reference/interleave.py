"""Owns which context-parallel rank computes which token of a chunk, and how gathered rows return to token order.

Rank r of n computes the positions p with p % n == r. Ranks are padded to the same count, so that all of them make the
same collectives with the same shapes, however the chunk's length divides.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdlink.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class ChunkShares:
    """A chunk of tokens [start, start + num_tokens) spread over `cp_size` ranks."""

    start: int
    num_tokens: int
    cp_size: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.num_tokens < 1 or self.cp_size < 1:
            raise InvalidInput(
                f"a chunk needs start >= 0, num_tokens >= 1 and cp_size >= 1, got {self.start}, {self.num_tokens} "
                f"and {self.cp_size}"
            )

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def padded(self) -> int:
        """Rows that every rank computes, padding included."""
        return -(-self.num_tokens // self.cp_size)

    def holder(self, position: int) -> int:
        """The rank that computes `position`."""
        return position % self.cp_size

    def positions(self, rank: int) -> tuple[int, ...]:
        """The positions that `rank` computes, increasing; none where the chunk is too short."""
        return tuple(range(self._first(rank), self.end, self.cp_size))

    def padded_positions(self, rank: int) -> tuple[int, ...]:
        """`positions`, then the chunk's last position again and again up to `padded`; those rows are dropped."""
        own = self.positions(rank)
        return own + (self.end - 1,) * (self.padded - len(own))

    def row(self, position: int) -> int:
        """Where among its rank's rows `position` lies."""
        return (position - self._first(self.holder(position))) // self.cp_size

    def natural_order(self) -> tuple[int, ...]:
        """For each position of the chunk, its row among all ranks' rows laid end to end; padding rows are not named."""
        positions = range(self.start, self.end)
        return tuple(self.holder(one) * self.padded + self.row(one) for one in positions)

    def _first(self, rank: int) -> int:
        return self.start + (rank - self.start) % self.cp_size
