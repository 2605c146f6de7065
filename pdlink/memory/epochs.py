"""Owns the numbers by which ranks order reads and writes of each other's memory. Pure: it waits for nothing.

Each rank of a shard group has two epochs that only grow, and every rank can look at all of them:

- `written`: the rank's own layers hold all that a gather at this epoch may want;
- `read`: the rank's gathers up to this epoch are over.

A gather at an epoch waits until the owner has `written` it. Whoever changes rows that others may be gathering waits
until every rank has `read` all that came before. A forward begins a range of epochs; a move, a restore or a write to
prefix rows inside it opens the next epoch of the range. A rank that has nothing to do jumps to the end of the range, so
nobody waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdlink.errors import LimitReached

CHANGES_PER_FORWARD = 1 << 20


def begin_of(forward: int) -> int:
    """The first epoch of a forward. Forwards count from 1; before them is the time in which a pool is filled."""
    return forward * CHANGES_PER_FORWARD


def end_of(forward: int) -> int:
    """The last epoch of a forward, which also stands for the time between it and the next."""
    return begin_of(forward + 1) - 1


@dataclass(slots=True)
class EpochCursor:
    """Where one rank is. It goes through `begin`, `change` (any number) and `end` of one forward after another."""

    epoch: int = end_of(0)
    num_changes: int = 0

    def begin(self, forward: int) -> int:
        """The first epoch of `forward`."""
        self.epoch, self.num_changes = begin_of(forward), 0
        return self.epoch

    def change(self, forward: int) -> int:
        """The epoch after one more change in `forward`. Raises `LimitReached` when a forward has too many."""
        if self.epoch + 1 >= end_of(forward):
            raise LimitReached(
                f"forward {forward} has more than {CHANGES_PER_FORWARD - 2} moves, restores and writes to prefix rows; "
                "end it and begin another"
            )
        self.epoch += 1
        self.num_changes += 1
        return self.epoch

    def end(self, forward: int) -> int:
        """The last epoch of `forward`."""
        self.epoch = end_of(forward)
        return self.epoch

    @property
    def before_writes(self) -> int:
        """What all must have read before rows that no gather of this forward wants are written."""
        return self.epoch if self.epoch % CHANGES_PER_FORWARD == CHANGES_PER_FORWARD - 1 else begin_of(self.forward) - 1

    @property
    def forward(self) -> int:
        return self.epoch // CHANGES_PER_FORWARD
