"""Owns the bookkeeping of scratch buffers: which layer sits in which slot, and whether it is valid. It holds no bytes.

Every rank of a shard group runs the same ring through the same calls, also for the layers that it owns itself: a
layer's owner has to know whether the others still hold a copy, because only then does it take part in a broadcast.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from pdlink.errors import LayoutError, StateError

MIN_SLOTS = 2


@dataclass(slots=True)
class _Slot:
    layer: int | None = None
    valid: bool = False
    last_use: int = 0


class ScratchRing:
    """`num_slots` slots (at least 2) for layers of one component. Not thread-safe.

    A layer is *held* while it has a slot and *valid* once its rows are in it. The pinned layer, the one that is being
    read, keeps its slot until another is pinned: claims take an empty slot, else the one used longest ago.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < MIN_SLOTS:
            raise LayoutError(f"scratch_slots={num_slots} is too few: one is read while the next is filled; give 2")
        self._slots = [_Slot() for _ in range(num_slots)]
        self._pinned: int | None = None
        self._clock = 0

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def pinned(self) -> int | None:
        return self._pinned

    def slot_of(self, layer: int) -> int | None:
        """The slot of `layer`, valid or not."""
        for index, slot in enumerate(self._slots):
            if slot.layer == layer:
                return index
        return None

    def is_valid(self, layer: int) -> bool:
        index = self.slot_of(layer)
        return index is not None and self._slots[index].valid

    def held(self) -> Iterator[tuple[int, int, bool]]:
        """(slot, layer, valid) of every slot in use."""
        for index, slot in enumerate(self._slots):
            if slot.layer is not None:
                yield index, slot.layer, slot.valid

    def claim(self, layer: int, keep: Collection[int] = ()) -> int:
        """A slot for `layer`, not valid yet: the one it has, else an empty one, else the least recently used.

        Layers in `keep` keep theirs; at least one slot must hold neither them nor the pinned layer.
        """
        index = self.slot_of(layer)
        if index is None:
            index = self._victim(keep)
        self._slots[index] = _Slot(layer, False, self._tick())
        return index

    def fill(self, layer: int) -> None:
        """The rows of `layer` are in its slot now. Raises `StateError` when it has none."""
        self._slots[self._index(layer)].valid = True

    def pin(self, layer: int) -> int:
        """`layer` is being read: it keeps its slot, the layer pinned before no longer does. Returns the slot."""
        index = self._index(layer)
        self._slots[index].last_use = self._tick()
        self._pinned = layer
        return index

    def invalidate(self, layer: int) -> bool:
        """What scratch holds of `layer` is no longer right. Returns whether it was valid."""
        index = self.slot_of(layer)
        if index is None:
            return False
        was = self._slots[index].valid
        self._slots[index].valid = False
        return was

    def clear(self) -> None:
        """Hold nothing and pin nothing."""
        self._slots = [_Slot() for _ in self._slots]
        self._pinned = None

    def _index(self, layer: int) -> int:
        index = self.slot_of(layer)
        if index is None:
            raise StateError(f"layer {layer} has no scratch slot")
        return index

    def _victim(self, keep: Collection[int]) -> int:
        held = {self._pinned, *keep}
        free = [i for i, slot in enumerate(self._slots) if slot.layer is None or slot.layer not in held]
        return min(free, key=lambda i: (self._slots[i].layer is not None, self._slots[i].last_use))

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
