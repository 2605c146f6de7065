"""The scratch ring: which layer is held, which is valid, and which is given up, against a plain model."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdlink.errors import LayoutError, StateError
from pdlink.memory.scratch_ring import ScratchRing

LAYERS = st.integers(0, 6)


class RingMachine(RuleBasedStateMachine):
    """`order` holds the held layers, the least recently used first."""

    @initialize(num_slots=st.integers(2, 4))
    def make(self, num_slots: int) -> None:
        self.ring = ScratchRing(num_slots)
        self.order: list[int] = []
        self.valid: set[int] = set()
        self.pinned: int | None = None
        self.slots: dict[int, int] = {}

    @rule(layer=LAYERS)
    def claim(self, layer: int) -> None:
        slot = self.ring.claim(layer)
        if layer not in self.order and len(self.order) == self.ring.num_slots:
            lost = next(one for one in self.order if one != self.pinned)
            assert slot == self.slots.pop(lost), "the least recently used layer that is not pinned goes"
            self.order.remove(lost)
            self.valid.discard(lost)
        assert slot not in [at for one, at in self.slots.items() if one != layer]
        assert self.slots.setdefault(layer, slot) == slot, "a layer that is held keeps its slot"
        self.order = [one for one in self.order if one != layer] + [layer]
        self.valid.discard(layer)

    @rule(layer=LAYERS)
    def fill(self, layer: int) -> None:
        if layer in self.order:
            self.ring.fill(layer)
            self.valid.add(layer)
        else:
            with pytest.raises(StateError):
                self.ring.fill(layer)

    @rule(layer=LAYERS)
    def pin(self, layer: int) -> None:
        if layer in self.order:
            assert self.ring.pin(layer) == self.slots[layer]
            self.order = [one for one in self.order if one != layer] + [layer]
            self.pinned = layer
        else:
            with pytest.raises(StateError):
                self.ring.pin(layer)

    @rule(layer=LAYERS)
    def invalidate(self, layer: int) -> None:
        assert self.ring.invalidate(layer) == (layer in self.valid)
        self.valid.discard(layer)

    @precondition(lambda self: len(self.order) > 1)
    @rule()
    def clear(self) -> None:
        self.ring.clear()
        self.order, self.valid, self.pinned, self.slots = [], set(), None, {}

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "ring"):
            return
        assert {layer for _, layer, _ in self.ring.held()} == set(self.order)
        assert {layer for _, layer, valid in self.ring.held() if valid} == self.valid
        assert self.ring.pinned == self.pinned
        for layer in range(7):
            assert self.ring.is_valid(layer) == (layer in self.valid)
            assert self.ring.slot_of(layer) == self.slots.get(layer)


TestRing = RingMachine.TestCase


@pytest.mark.parametrize("num_slots", [0, 1])
def test_a_ring_of_fewer_than_two_slots_is_refused(num_slots: int) -> None:
    with pytest.raises(LayoutError, match=f"scratch_slots={num_slots}"):
        ScratchRing(num_slots)


def test_the_layer_that_is_read_survives_the_fetch_of_another() -> None:
    ring = ScratchRing(2)
    for layer in (4, 7):
        ring.claim(layer)
        ring.fill(layer)
    ring.pin(4)
    ring.claim(9)
    assert ring.is_valid(4)
    assert not ring.is_valid(7)
