"""Owns what was made of small batches, for when the very same batch comes again, as it does where slots are pulled.

It checks and makes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from pdlink.transfer.descriptors import PullBatch
from pdlink.transfer.kept import Kept

MAX_DESCRIPTORS = 8
"""What is made of more is never kept: it is seldom the same twice, and large."""
MAX_PLANS = 256

T = TypeVar("T")


def is_kept(batch: PullBatch) -> bool:
    """Whether what is made of `batch` is kept."""
    return batch.num_descriptors <= MAX_DESCRIPTORS


class KeptPlans(Generic[T]):
    """The parts of batches, each with what it was checked by."""

    def __init__(self) -> None:
        self._plans: Kept[PullBatch, tuple[object, tuple[T, ...]]] = Kept(MAX_PLANS)

    def parts(self, batch: PullBatch, table: object, make: Callable[[], Iterable[T]]) -> Iterator[T]:
        """What `make` made of `batch` last time, if `table`, by which it was checked, is still the same; else anew.

        Raises what `make` raises, and keeps nothing then.
        """
        known = self._plans.get(batch)
        if known and known[0] is table:
            return iter(known[1])
        made = make()
        if not is_kept(batch):
            return iter(made)
        return iter(self._plans.put(batch, (table, tuple(made)))[1])
