"""Owns what is known of the token slots of one write: their numbers on the host, and the same where the pool lies.

A device's tensor is looked at once in a forward, however many layers it is handed in for: the host waits for that look
alone, and for no layer.
"""

from __future__ import annotations

import torch

from pdlink.layout import Component
from pdlink.memory.captured_forward import check_captured
from pdlink.memory.forward import LivePages
from pdlink.memory.token_rows import check_slot_shape, check_slots


class Slots:
    """Token slots (page * page_size + row): `host` is int64 [n] in host memory, `here` the same beside the pool."""

    def __init__(self, host: torch.Tensor, here: torch.Tensor) -> None:
        self.host = host
        self.here = here
        self._checked: set[tuple[int, int]] = set()
        self._inside: dict[int, tuple[LivePages, torch.Tensor, bool]] = {}

    def __len__(self) -> int:
        return len(self.host)

    def check(self, about: Component, num_pages: int) -> None:
        """Raise `LayoutError` unless they are slots of a pool of `num_pages` pages."""
        facts = (about.page_size, num_pages)
        if facts not in self._checked:
            check_slots(self.host, about, num_pages)
            self._checked.add(facts)

    def inside(self, live: LivePages) -> tuple[torch.Tensor, bool]:
        """bool [n] in host memory: which are rows of `live`; and whether any is."""
        found = self._inside.get(id(live))
        if found is None:
            mask = torch.from_numpy(live.contains(self.host.numpy()))
            # With what it was made of, so that no other object can get its id meanwhile.
            found = self._inside[id(live)] = live, mask, bool(mask.any())
        return found[1:]


class CapturedSlots(Slots):
    """Slots that a graph finds in a tensor at each replay: nobody looks at them, and none may be a prefix row then."""

    def __init__(self, here: torch.Tensor) -> None:
        super().__init__(here, here)

    def check(self, about: Component, num_pages: int) -> None:
        """Raise `LayoutError` unless they are int64 [n]."""
        check_slot_shape(self.here)

    def inside(self, live: LivePages) -> tuple[torch.Tensor, bool]:
        """None of them."""
        return torch.zeros(len(self), dtype=torch.bool), False


class SlotLooks:
    """Looks at slot tensors for a pool on `device` (None: in host memory). One thread.

    Rule: a tensor of slots on a device is not changed in place between `clear` and `clear`.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._seen: tuple[torch.Tensor, Slots] | None = None

    def at(self, slots: torch.Tensor) -> Slots:
        """What is known of `slots`; waits for the device where they lie on one and have not been seen."""
        if self._device is None:
            return Slots(slots, slots)
        if self._seen is not None and self._seen[0] is slots:
            return self._seen[1]
        found = Slots(slots.cpu(), slots.to(self._device))
        if slots.device.type != "cpu":
            self._seen = (slots, found)
        return found

    def unseen(self, slots: torch.Tensor) -> Slots:
        """`slots` as a graph that is being captured will find them. Raises `StateError` when they lie elsewhere."""
        check_captured(slots, self._device, "slots")
        return CapturedSlots(slots)

    def clear(self) -> None:
        """A forward begins or is over: whoever made slots may make others in the same place."""
        self._seen = None
