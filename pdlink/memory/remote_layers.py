"""Owns the forward as all ranks see it: its begin and end, what fails it, and what makes a copy of a layer stale.

How copies get into scratch is `fetches`; a `LayerReader` moves them. Owned memory is not touched here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress

import torch

from pdlink.errors import DeadlineExceeded, IntegrityError, PdlinkError, StateError
from pdlink.layout import CacheLayout, Component, fingerprint
from pdlink.memory.captured_forward import CapturedForward
from pdlink.memory.fetches import Fetches, check_no_capture
from pdlink.memory.forward import LayerKey, LivePages, ReadSpan, digest63, live_pages
from pdlink.memory.forward_state import ForwardState, check_order
from pdlink.memory.layer_reader import NO_GRAPHS, LayerReader
from pdlink.memory.lockstep import Step, StepKind
from pdlink.memory.owned_regions import OwnedRegions
from pdlink.memory.pool_stats import PoolStats
from pdlink.memory.slot_looks import Slots
from pdlink.memory.token_rows import put_fields


class RemoteLayers:
    """Reads of split layers, in step with the other ranks. `reader` is None where every layer is local. One thread."""

    def __init__(
        self,
        layout: CacheLayout,
        regions: OwnedRegions,
        reader: LayerReader | None,
        num_pages: int,
        scratch_slots: int,
        *,
        prefetch: bool = False,
    ) -> None:
        self._layout = layout
        self._regions = regions
        self._reader = reader
        self._num_pages = num_pages
        self._setup_digest = 0
        self._forward: ForwardState | None = None
        self._forward_number = 0
        self._closed = False
        self._reads = 0
        self.fetches = Fetches(layout, regions, reader, scratch_slots, prefetch=prefetch)
        if reader is not None:
            facts = (num_pages, scratch_slots, prefetch, reader.owners.digest, fingerprint(layout).items)
            self._setup_digest = digest63(repr(facts).encode())
        # A reader may have served another pool before.
        self._agreed_before = reader.nbytes_agreed if reader else 0
        if reader is not None:
            reader.attach(layout, regions)
        self._moved_before = reader.nbytes_moved if reader else 0

    @property
    def forward(self) -> ForwardState | None:
        """The forward that has begun and not ended, failed or not."""
        return self._forward

    @property
    def stats(self) -> PoolStats:
        moved, agreed = (self._reader.nbytes_moved, self._reader.nbytes_agreed) if self._reader else (0, 0)
        return PoolStats(
            self._reads,
            self.fetches.hits,
            self.fetches.fetches,
            moved - self._moved_before,
            self.fetches.nbytes_last,
            agreed - self._agreed_before,
        )

    def is_split(self, key: LayerKey) -> bool:
        """Whether ranks other than the owner have to fetch the layer."""
        return self._reader is not None and self._reader.owners.is_split(key)

    def prepare_capture(self, layer_order: Sequence[LayerKey]) -> CapturedForward:
        """See `LayerShardedPool.prepare_capture`."""
        if self._regions.device is None:
            raise StateError("a pool in host memory has nothing that is captured into a graph")
        if self._reader is not None and self._reader.is_collective:
            raise StateError(NO_GRAPHS)
        check_no_capture(self._regions, "the preparation of a capture")
        return CapturedForward(
            self._layout, check_order(self._layout, layer_order), self._num_pages, self._regions.device
        )

    @contextmanager
    def capturing(self, captured: CapturedForward) -> Iterator[None]:
        """See `LayerShardedPool.capturing`."""
        self._check_between("a capture")
        device = self._regions.device
        if device is None or not device.is_capturing:
            raise StateError("capturing(...) is used inside the capture of a graph (torch.cuda.graph)")
        if captured.is_captured:
            raise StateError("a graph was captured for this already; prepare another for each graph")
        self.drop_forward()
        fetches = self.fetches
        before = self._reads, fetches.hits, fetches.fetches, fetches.nbytes_last
        # From here on what is launched in FETCH is captured too.
        device.fork()
        self._forward = forward = ForwardState(0, captured.pages, captured.order, capture=captured)
        try:
            with self._reader.capturing(captured.base) if self._reader else nullcontext():
                fetches.start(forward)
                yield
            if forward.failure is not None:
                raise IntegrityError(f"the capture of a forward failed: {forward.failure}") from forward.failure
            captured.finish(self._reads - before[0], fetches.hits - before[1])
        finally:
            self.drop_forward()
            self._reads, fetches.hits, fetches.fetches, fetches.nbytes_last = before
            # A capture that ends before what it has forked is no graph.
            device.join(device.mark())

    def begin(
        self, spans: Sequence[ReadSpan], layer_order: Sequence[LayerKey], replay: CapturedForward | None = None
    ) -> None:
        """See `LayerShardedPool.begin_forward`."""
        self._check_between("a begin")
        check_no_capture(self._regions, "a begin")
        if replay is not None:
            replay.check_ready()
        self.drop_forward()
        self._forward_number += 1
        try:
            order = check_order(self._layout, layer_order) if replay is None else replay.order
            live = live_pages(self._layout, spans, self._num_pages)
        except PdlinkError:
            # The others wait in the exchange by now, or soon: they hear of it at once rather than after a timeout.
            if self._reader is not None:
                self._reader.announce(Step(StepKind.BEGIN, self._forward_number))
            raise
        self._forward = ForwardState(self._forward_number, live, order, replay=replay)
        with self._failing(self._forward):
            if self._reader is not None:
                self._wait_for_sent_loads()
                self._reader.begin(self._forward.begin_step(self._setup_digest), order)
            if replay is not None:
                self._replay(replay, live)
        if self._reader is not None and replay is None:
            self.fetches.start(self._forward)

    def skip(self) -> None:
        """See `LayerShardedPool.skip_forward`."""
        self._check_between("a skip")
        self.drop_forward()
        if self._reader is not None:
            self._reader.skip(Step(StepKind.SKIP, self._forward_number + 1, setup_digest=self._setup_digest))
        self._forward_number += 1

    def end(self) -> None:
        """See `LayerShardedPool.end_forward`."""
        forward = self._forward
        if forward is None:
            raise StateError("no forward has begun")
        check_no_capture(self._regions, "an end")
        try:
            if forward.failure is not None:
                raise IntegrityError(f"forward {forward.number} failed: {forward.failure}") from forward.failure
            if self._reader is not None:
                with self._failing(forward):
                    self.fetches.stop()
                    if forward.replay is not None:
                        forward.replay.follow()
                    self._reader.end(forward.end_step())
        finally:
            self.drop_forward()

    def running(self, what: str) -> ForwardState:
        """The forward, if one is running and has not failed."""
        if self._forward is None:
            raise StateError(f"{what}: no forward has begun; call begin_forward with the batch's prefixes first")
        if self._forward.failure is not None:
            raise IntegrityError(
                f"{what}: forward {self._forward.number} has failed: {self._forward.failure}"
            ) from self._forward.failure
        self._forward.check_no_replay(what)
        return self._forward

    def check_eager(self, what: str) -> None:
        """Raise `StateError` in a forward that is captured into a graph, or that a graph makes."""
        if self._forward is not None:
            self._forward.check_eager(what)

    @property
    def is_capturing(self) -> bool:
        """Whether a forward is captured into a graph."""
        return self._forward is not None and self._forward.capture is not None

    def wait_for_load(self, key: LayerKey) -> None:
        """As `Fetches.wait_for_load`; for a replay all loads are waited for when its forward begins."""
        if not self.is_capturing:
            self.fetches.wait_for_load(key)

    def read(self, key: LayerKey) -> torch.Tensor:
        """See `LayerShardedPool.read`."""
        self.wait_for_load(key)
        forward = self.running(f"read of {key[0]!r} layer {key[1]}") if self.is_split(key) else None
        self._reads += 1
        if forward is None:
            return self._regions.tensor(key)
        try:  # `_failing`, written out for the sake of time
            return self.fetches.read(forward, key)
        except PdlinkError as exc:
            self._fail(forward, exc)
            raise

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Owned rows that others may want to read are changed inside, on all ranks alike."""
        if self._reader is None:
            yield
            return
        with self._failing(self._forward):
            self.fetches.stop()
            self._reader.before_change()
        yield
        self._reader.after_change()

    @contextmanager
    def writing(self, about: Component, layer: int, slots: Slots) -> Iterator[torch.Tensor | None]:
        """Rows at `slots` of a layer are written inside. Gives bool [n]: which of them only the owner may have.

        None where that makes no difference: outside a forward, and for layers that every rank has.
        """
        key = (about.name, layer)
        if self._reader is None or not self.is_split(key):
            yield None
            return
        history, is_change = None, False
        if self._forward is not None:
            self._forward.check_no_replay(f"a write of {about.name!r} layer {layer}")
            history, is_change = slots.inside(self._forward.wanted(key, about.page_group))
        if is_change:
            with self.changing():
                yield history
            return
        if key in self._regions:
            with self._failing(self._forward):
                self._reader.before_write()
        yield history

    def _check_between(self, what: str) -> None:
        """Raise `StateError` unless no forward is running, or one that has failed."""
        if self._forward is not None and self._forward.failure is None:
            raise StateError(f"{what}: forward {self._forward.number} has not ended; call end_forward first")
        if self._closed:
            raise StateError(f"{what}: the pool is closed")

    def _replay(self, replay: CapturedForward, live: dict[str, LivePages]) -> None:
        """What the engine launches next is a replay."""
        for key in self._layout.cells():
            self.fetches.wait_for_load(key)
        replay.fill(self._forward_number, live)
        reads, hits, fetches = replay.counts
        self._reads += reads
        self.fetches.hits += hits
        self.fetches.fetches += fetches
        nbytes, self.fetches.nbytes_last = replay.nbytes(live)
        if self._reader is not None:
            self._reader.replayed(nbytes)

    def _wait_for_sent_loads(self) -> None:
        """Before others are told that they may gather: their gathers do not ask again."""
        if self._reader is not None and not self._reader.is_collective:
            for key in self._reader.owners.table:
                if self.is_split(key):
                    self.fetches.wait_for_load(key)

    def wait_for_readers(self) -> None:
        """See `LayerShardedPool.wait_for_readers`."""
        if self._reader is not None:
            with self._failing(self._forward):
                self._reader.before_write()

    def wrote(
        self,
        about: Component,
        layer: int,
        slots: Slots,
        fields: Mapping[str, torch.Tensor],
        history: torch.Tensor | None,
    ) -> None:
        """Rows were written, on all ranks alike: keep scratch right. `history` is what `writing` gave."""
        key = (about.name, layer)
        if self._forward is None or history is None:
            return
        _, changed = slots.inside(self._forward.wanted(key, about.page_group))
        if changed:
            self.fetches.invalidate(key)
        if key in self._regions:
            return
        here = slots.here
        if changed:
            mine = (~history).to(here.device)
            here = here[mine]
            fields = {name: data[mine] for name, data in fields.items()}
        self._forward.chunk.keep(key, here, fields)
        buffer = self.fetches.valid_buffer(key)
        if buffer is not None:
            put_fields(buffer, about, here, fields)

    def supersede(self, key: LayerKey, slots: Slots) -> None:
        """The owner has other rows at `slots` now: what scratch and chunk rows hold of them is stale."""
        if self._forward is None or not self.is_split(key):
            return
        self.fetches.invalidate(key)
        self._forward.change(key, slots.host.numpy().copy())
        self._forward.chunk.forget(key, slots.here)

    def drop_forward(self) -> None:
        """Back to between forwards, with nothing in scratch."""
        self._forward = None
        self.fetches.clear()
        self.fetches.stop()

    def close(self) -> None:
        """Free the scratch buffers; the reader is its owner's to close. Twice is fine."""
        self.drop_forward()
        if self._reader is not None and not self._closed:
            self._reader.detach()
        self._closed = True
        self.fetches.close()

    @contextmanager
    def _failing(self, forward: ForwardState | None) -> Iterator[None]:
        """Whatever fails inside fails the forward, if there is one."""
        try:
            yield
        except PdlinkError as exc:
            if forward is not None:
                self._fail(forward, exc)
            raise

    def _fail(self, forward: ForwardState, exc: PdlinkError) -> None:
        forward.failure = exc
        self.fetches.clear()
        if self._reader is not None and forward.capture is None:
            if forward.replay is not None:
                forward.replay.follow()
            # Fetches that run on must not be told of as over.
            with suppress(DeadlineExceeded):
                self.fetches.stop()
                self._reader.fail(forward.end_step())
