"""Owns the scratch copies of layers that others own: which are there, which are on their way, how they are brought.

Whether a forward is running, and what its failure means, is `remote_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pdlink.errors import LayoutError, StateError
from pdlink.layout import CacheLayout
from pdlink.memory.ahead import Ahead
from pdlink.memory.forward import LayerKey
from pdlink.memory.forward_state import ForwardState
from pdlink.memory.layer_reader import LayerReader
from pdlink.memory.lockstep import StepKind
from pdlink.memory.owned_regions import OwnedRegions
from pdlink.memory.scratch import Scratch
from pdlink.memory.token_rows import put_fields


class Fetches:
    """Fetches into scratch over `reader`, which is None where every layer is local. One thread.

    With `prefetch` the next layers of the order are fetched while one is used: by a thread, or on a device by launching
    them in its own lane. Without, a device still launches what else is read of a layer, if that comes next in the
    order, with what is read of it first: it is busy with the one while the host launches the other.
    """

    def __init__(
        self,
        layout: CacheLayout,
        regions: OwnedRegions,
        reader: LayerReader | None,
        scratch_slots: int,
        *,
        prefetch: bool,
    ) -> None:
        self._layout = layout
        self._regions = regions
        self._reader = reader
        self._scratch: dict[str, Scratch] = {}
        self._ahead: Ahead | None = None
        self._crosses_layers = prefetch
        self.load_wait: Callable[[str, int], None] | None = None
        self.hits = self.fetches = self.nbytes_last = 0
        if reader is None:
            return
        if prefetch or (regions.device is not None and not reader.is_collective):
            # Waits for some fetches in turn, each of which may take as long as its reader waits.
            limit_s = (scratch_slots + 1) * reader.timeout_s
            self._ahead = Ahead(limit_s, runs_here=regions.device is not None)
        remote = reader.owners.remote_components(reader.rank)
        self._scratch = {
            name: Scratch(
                layout.component(name),
                regions.num_pages,
                scratch_slots,
                reads_remotely=name in remote,
                device=regions.device,
            )
            for name in reader.owners.split_components()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all scratch buffers."""
        return sum(one.nbytes for one in self._scratch.values())

    def buffers(self, component: str) -> tuple[torch.Tensor, ...]:
        return self._scratch[component].buffers if component in self._scratch else ()

    def wait_for_load(self, key: LayerKey) -> None:
        """Return when an owned layer is loaded, or what follows on the stream waits for that."""
        if self.load_wait is not None and key in self._regions:
            self.load_wait(*key)

    def start(self, forward: ForwardState) -> None:
        """A forward has begun."""
        if self._ahead is not None:
            self._ahead.start([key for key in forward.order if self._is_fetched(key)])
            if self._crosses_layers:
                self._go_ahead(forward, 0)

    def read(self, forward: ForwardState, key: LayerKey) -> torch.Tensor:
        """A split layer, with every row of it that counts in place: own memory, or scratch."""
        if not self._is_fetched(key):
            return self._regions.tensor(key)
        component, layer = key
        scratch = self._scratch[component]
        if scratch.ring.is_valid(layer):
            self.hits += 1
            scratch.ring.pin(layer)
            self._go_ahead(forward, layer)
        else:
            self._bring(forward, key, scratch)
        buffer = scratch.buffer_of(layer)
        if key in self._regions or buffer is None:
            return self._regions.tensor(key)
        return buffer

    def valid_buffer(self, key: LayerKey) -> torch.Tensor | None:
        """Where scratch holds a layer, if it does and its rows are there."""
        scratch = self._scratch[key[0]]
        return scratch.buffer_of(key[1]) if scratch.ring.is_valid(key[1]) else None

    def invalidate(self, key: LayerKey) -> None:
        """What scratch holds of the layer is no longer right."""
        self._scratch[key[0]].ring.invalidate(key[1])

    def clear(self) -> None:
        """Hold nothing."""
        for one in self._scratch.values():
            one.ring.clear()

    def stop(self) -> None:
        """Fetch nothing more ahead in this forward; what was not taken yet does not count."""
        if self._ahead is not None:
            for component, layer in self._ahead.stop():
                self._scratch[component].ring.invalidate(layer)

    def close(self) -> None:
        """Give the buffers back; twice is fine."""
        if self._ahead is not None:
            self._ahead.close()
        for one in self._scratch.values():
            one.drop()

    def _is_fetched(self, key: LayerKey) -> bool:
        """Whether a read of the layer has to move something, or, for its owner, to take part in that."""
        if self._reader is None or not self._reader.owners.is_split(key):
            return False
        return self._reader.is_collective or key not in self._regions

    def _bring(self, forward: ForwardState, key: LayerKey, scratch: Scratch) -> None:
        """Have the layer's rows in scratch: take what was fetched ahead, else fetch it now."""
        component, layer = key
        if forward.capture is None:
            check_no_capture(self._regions, f"read of {component!r} layer {layer}")
        if self._ahead is None or not self._ahead.take(key):
            passed = None if self._ahead is None else self._ahead.pass_by(key)
            if passed is None:
                self.stop()
            for one in passed or ():
                scratch.ring.invalidate(one)
            before = self._reader.nbytes_moved if self._reader else 0
            self._fetch(forward, key, ())()
            self.nbytes_last = self._reader.nbytes_moved - before if self._reader else 0
        scratch.ring.pin(layer)
        self._go_ahead(forward, layer)
        if self._reader is not None:
            self._reader.land(key)
        self.fetches += 1
        buffer = None if key in self._regions else scratch.buffer_of(layer)
        if buffer is not None:
            for slots, fields in forward.chunk.of(key):
                put_fields(buffer, self._layout.component(component), slots, fields)
        scratch.ring.fill(layer)

    def _fetch(self, forward: ForwardState, key: LayerKey, keep: Sequence[int]) -> Callable[[], None]:
        """Claim a slot for a layer, without taking it from those to `keep`; returns what brings its rows there."""
        reader, (component, layer) = self._reader, key
        if reader is None:
            raise LayoutError(f"{component!r} layer {layer} is another rank's and the pool has no reader")
        about, scratch = self._layout.component(component), self._scratch[component]
        scratch.ring.claim(layer, keep)
        forward.sequence += 1
        wanted = forward.wanted(key, about.page_group)
        step = reader.step(StepKind.READ, forward.number, forward.sequence, key, wanted)
        region = self._regions.tensor(key) if key in self._regions else None
        buffer = scratch.buffer_of(layer) if region is None else None
        if forward.capture is not None:
            forward.capture.fetches(about)

        def fetch() -> None:
            self.wait_for_load(key)
            reader.fetch(step, about, wanted, region, buffer)

        return fetch

    def _go_ahead(self, forward: ForwardState, layer: int) -> None:
        """Start on what is next in the order, as far as scratch has room beside the layer that is being read."""
        while self._ahead is not None and (key := self._ahead.next) is not None:
            if key[1] != layer and not self._crosses_layers:
                return
            under_way, ring = self._ahead.under_way(key[0]), self._scratch[key[0]].ring
            if len(under_way) >= ring.num_slots - 1 or ring.slot_of(key[1]) is not None:
                return
            self._ahead.submit(self._fetch(forward, key, under_way))


def check_no_capture(regions: OwnedRegions, what: str) -> None:
    """Raise `StateError` while the engine captures a graph: what a layer needs to arrive would be made once, and never
    again when the graph is replayed."""
    if regions.device is not None and regions.device.is_capturing:
        raise StateError(
            f"{what}: not inside a CUDA graph that the pool does not know of; capture the reads and writes of a forward"
            " inside pool.capturing(...), and begin and end it outside. Or read outside too, and capture what is"
            " between reads: with one layer order a layer has the same scratch buffer in every forward"
        )
