"""Owns the description of staging memory: where a rank's equal slots lie. It allocates and hands out nothing."""

from __future__ import annotations

from dataclasses import dataclass

from pdlink.errors import LayoutError
from pdlink.layout.regions import MemoryKind, Region

MAX_SLOTS = 1 << 16
COMPONENT = "staging"
"""What its region is called. No cache layout has a component of that name."""


@dataclass(frozen=True, slots=True)
class StagingArea:
    """`num_slots` slots of `slot_bytes` bytes each, one after the other from `base_address`, in memory of
    one kind and device.

    `backends` names those that can move bytes into and out of it. Raises `LayoutError` for what cannot be memory.
    """

    base_address: int
    slot_bytes: int
    num_slots: int
    backends: tuple[str, ...] = ()
    memory: MemoryKind = MemoryKind.HOST
    device: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_slots <= MAX_SLOTS or self.slot_bytes < 1:
            raise LayoutError(
                f"a staging area has num_slots={self.num_slots} of slot_bytes={self.slot_bytes}; 1..{MAX_SLOTS} slots "
                "of at least 1 byte make one"
            )
        self.region()  # which checks the addresses

    def region(self) -> Region:
        """The area as backends see it: every slot is a page."""
        shape = (self.base_address, self.slot_bytes, self.slot_bytes, self.num_slots)
        return Region(COMPONENT, 0, *shape, self.memory, self.device)

    def address(self, slot: int) -> int:
        return self.base_address + slot * self.slot_bytes
