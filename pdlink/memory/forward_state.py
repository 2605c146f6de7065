"""Owns what the pool remembers during one forward: what is read, what was written or changed, whether it failed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdlink.errors import LayoutError, PdlinkError, StateError
from pdlink.layout import CacheLayout
from pdlink.memory.captured_forward import CapturedForward
from pdlink.memory.chunk_rows import ChunkRows
from pdlink.memory.forward import LayerKey, LivePages, digest63
from pdlink.memory.lockstep import Step, StepKind


class ForwardState:
    """One forward, from its begin to its end. Every rank of the shard group has an equal one.

    `capture` is what a graph is captured for, instead of a forward being made; with `replay` a graph makes it.
    """

    def __init__(
        self,
        number: int,
        live: dict[str, LivePages],
        order: Sequence[LayerKey],
        *,
        capture: CapturedForward | None = None,
        replay: CapturedForward | None = None,
    ) -> None:
        self.number = number
        self.order = tuple(order)
        self.capture = capture
        self.replay = replay
        self.sequence = 0
        self.chunk = ChunkRows()
        self.failure: PdlinkError | None = None
        self._live = live
        self._changed: dict[LayerKey, list[np.ndarray]] = {}

    def prefix(self, page_group: str) -> LivePages:
        """The prefix rows of the batch."""
        return self._live[page_group]

    def wanted(self, key: LayerKey, page_group: str) -> LivePages:
        """Rows that only the layer's owner has: the prefix, and what was moved or restored there since the begin."""
        changed = self._changed.get(key)
        live = self.prefix(page_group)
        return live.adding(np.concatenate(changed)) if changed else live

    def change(self, key: LayerKey, slots: np.ndarray) -> None:
        """The layer's owner got new rows at `slots` in another way than by a write on every rank."""
        self._changed.setdefault(key, []).append(slots)

    def check_eager(self, what: str) -> None:
        """Raise `StateError` in a forward that is captured into a graph, or that a graph makes."""
        if self.capture is not None:
            raise StateError(f"{what} cannot be captured into a graph; make it between forwards")
        self.check_no_replay(what)

    def check_no_replay(self, what: str) -> None:
        """Raise `StateError` in a forward that a graph makes."""
        if self.replay is not None:
            raise StateError(
                f"{what}: forward {self.number} is made by the replay of a graph, which has all its reads and writes; "
                "make it between forwards, or begin the forward without a replay"
            )

    def begin_step(self, setup_digest: int) -> Step:
        """The record of the begin: it differs between ranks whose forwards differ in anything."""
        pages = digest63(*(f"{name}:{one.num_pages}:{one.digest}".encode() for name, one in self._live.items()))
        return Step(
            StepKind.BEGIN,
            self.number,
            num_pages=sum(one.num_pages for one in self._live.values()),
            pages_digest=pages,
            order_digest=digest63(repr(self.order).encode()),
            setup_digest=setup_digest,
        )

    def end_step(self) -> Step:
        return Step(StepKind.END, self.number, self.sequence)


def check_order(layout: CacheLayout, order: Sequence[LayerKey]) -> tuple[LayerKey, ...]:
    """`order` as plain keys. Raises `LayoutError` for a layer that the layout lacks."""
    for name, layer in order:
        if layer not in layout.component(name).layers:
            raise LayoutError(f"layer order names {name!r} layer {layer}, which the layout lacks")
    return tuple((name, int(layer)) for name, layer in order)
