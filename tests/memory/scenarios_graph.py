"""Owns scenarios of forwards that graphs make: captured once, replayed with other pages and counts, bytes compared.

They run on GPUs, and on the device of pretence with graphs of its own (`thread_graph`).
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pdlink.errors import DeadlineExceeded, LayoutError, StateError
from pdlink.memory.forward import LayerKey, ReadSpan
from pdlink.memory.pool_device import Lane
from tests.memory.rank_world import (
    PAGE,
    World,
    all_fields,
    chunk_fields,
    dsa_layout,
    failure_of,
    owns,
    pattern,
    slots_of,
)
from tests.memory.thread_device import POISON, ThreadDevice
from tests.memory.thread_graph import ThreadGraph

LAYERS = 6
NUM_PAGES = 16
PAD = (NUM_PAGES - 1) * PAGE
"""Slots of rows that only fill the batch up, on a page that no request has."""
ROWS = 24
SOON_S = 30.0
SHORT_S = 2.0
BATCHES: tuple[tuple[ReadSpan, ...], ...] = (
    (ReadSpan([9, 2, 5], 2 * PAGE + 12),),
    (ReadSpan([0, 1, 2, 3, 4, 8, 13], 6 * PAGE + 63),),
    (),
    (ReadSpan([3], 1),),
    (ReadSpan([7, 11], PAGE + 1), ReadSpan([6, 14, 12], 3 * PAGE - 9), ReadSpan([10], 0)),
    (ReadSpan([3], 0),),
    (ReadSpan([9, 2, 5, 1], 3 * PAGE + 40),),
)


class CudaGraph:
    """A CUDA graph with the face of `ThreadGraph`."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        # What is collected while a graph is captured, another graph above all, may end the capture.
        gc.collect()
        gc.disable()
        try:
            with torch.cuda.graph(self._graph):
                yield
        finally:
            gc.enable()

    def replay(self) -> None:
        self._graph.replay()


class Engine:
    """An engine whose every forward writes `ROWS` rows to each layer and keeps what it read, by a graph or without.

    All ranks compute the same rows, so that each knows all bytes.
    """

    def __init__(self, world: World, *, timeout_s: float = 60.0, late_s: float = 5e-4) -> None:
        self.device: Any = world.gpu() if world.has_cuda else ThreadDevice(late_s=late_s)
        self.layout = dsa_layout(LAYERS)
        self.pool = world.pool(self.layout, NUM_PAGES, device=self.device, timeout_s=timeout_s)
        self.keys = sorted(self.layout.cells(), key=lambda key: (key[1], key[0]))
        self.truth = {key: pattern(*key, (NUM_PAGES, self._about(key).page_bytes)) for key in self.keys}
        self.graph: Any = CudaGraph() if world.has_cuda else ThreadGraph(self.device)
        self.salt = 0
        where = self.pool.device
        self.slots = torch.full((ROWS,), PAD, dtype=torch.int64, device=where) + torch.arange(ROWS, device=where)
        self.rows = {
            key: {name: data.to(where).clone() for name, data in chunk_fields(self.layout, key[0], ROWS, 0).items()}
            for key in self.keys
        }
        self.came = {
            key: torch.zeros((NUM_PAGES, self._about(key).page_bytes), dtype=torch.uint8, device=where)
            for key in self.keys
        }
        self.again = torch.zeros_like(self.came[self.keys[0]])

    def model(self) -> None:
        """Layers written before they are read and after, and one that is read again when scratch has lost it."""
        pool = self.pool
        for key in self.keys:
            if key[1] % 2:
                pool.read(*key)
            pool.write(*key, self.slots, self.rows[key])
            self.came[key].copy_(pool.read(*key))
        for key in self.keys:
            pool.read(*key)
        self.again.copy_(pool.read(*self.keys[0]))

    def capture(self) -> None:
        """After a forward without a graph, which loads all kernels."""
        self.forward(BATCHES[0], replays=False)
        self.captured = self.pool.prepare_capture(self.keys)
        before = self.pool.stats
        with self.graph.capture(), self.pool.capturing(self.captured):
            self.model()
        assert self.pool.stats == before, "nothing moves in a capture"

    def refill(self, spans: Sequence[ReadSpan], *, writes: bool = True) -> None:
        """Rows of a chunk behind the prefixes of a batch, padded."""
        self.salt += 1
        room = [slots_of(ReadSpan(one.pages, len(one.pages) * PAGE), PAGE, one.num_tokens)[:10] for one in spans]
        chunk = np.concatenate([np.empty(0, np.int64), *room])[: ROWS if writes else 0]
        slots = np.concatenate([chunk, PAD + np.arange(len(chunk), ROWS)])
        self.chunk, self.host_slots = chunk, slots
        self.slots.copy_(torch.from_numpy(slots))
        for key in self.keys:
            for name, data in chunk_fields(self.layout, key[0], ROWS, self.salt + 100 * key[1]).items():
                self.rows[key][name].copy_(data)

    def begin(self, spans: Sequence[ReadSpan], *, replays: bool) -> None:
        if replays:
            self.pool.begin_forward(spans, replay=self.captured)
            self.graph.replay()
        else:
            self.pool.begin_forward(spans, self.keys)
            self.model()

    def forward(self, spans: Sequence[ReadSpan], *, replays: bool = True, writes: bool = True) -> None:
        """One forward, with every byte that counts in what it read."""
        self.refill(spans, writes=writes)
        self.begin(spans, replays=replays)
        self.pool.end_forward()
        self.wrote()
        self.check(spans)

    def wrote(self) -> None:
        """The rows of the chunk are in the cache now."""
        for key in self.keys:
            fields = chunk_fields(self.layout, key[0], ROWS, self.salt + 100 * key[1])
            self.truth[key].reshape(-1)[self.places(key, self.host_slots)] = all_fields(fields)

    def check(self, spans: Sequence[ReadSpan], *, chunk: bool = True) -> None:
        """What was read has the rows of the prefixes, and of the chunk."""
        slots = np.concatenate([self.host_slots if chunk else [], *(slots_of(one, PAGE) for one in spans)]).astype(int)
        for key, came in [*self.came.items(), (self.keys[0], self.again)]:
            at = self.places(key, slots)
            assert np.array_equal(came.cpu().numpy().reshape(-1)[at], self.truth[key].reshape(-1)[at]), key

    def places(self, key: LayerKey, slots: np.ndarray) -> np.ndarray:
        """int64 [n, token_bytes]: where in a layer the bytes of tokens lie, all fields one after the other."""
        about = self.layout.component(key[0])
        page, row = np.divmod(slots, about.page_size)
        starts = [
            page * about.page_bytes + field.offset + row * field.token_stride + head * field.head_stride
            for field in about.fields
            for head in range(field.num_heads)
        ]
        sizes = [field.bytes_per_token for field in about.fields for _ in range(field.num_heads)]
        parts = [start[:, None] + np.arange(size) for start, size in zip(starts, sizes, strict=True)]
        return np.concatenate(parts, axis=1)

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        self.pool.move(None, torch.tensor(source), torch.tensor(target))
        for key in self.keys:
            truth = self.truth[key].reshape(-1)
            truth[self.places(key, np.array(target))] = truth[self.places(key, np.array(source))]

    def _about(self, key: LayerKey) -> Any:
        return self.layout.component(key[0])


def one_capture_serves_other_pages_and_counts(world: World) -> None:
    """None at all among them; and a replay counts what it moves as the same forward without a graph does."""
    engine = Engine(world)
    engine.capture()
    for spans in (*BATCHES, BATCHES[1]):
        counts: list[tuple[int, ...]] = []
        for replays in (True, False):
            before = engine.pool.stats
            engine.forward(spans, replays=replays)
            after = engine.pool.stats
            counts.append(
                (after.nbytes_moved - before.nbytes_moved, after.nbytes_last_fetch, after.reads - before.reads)
            )
        assert counts[0] == counts[1], spans


def replays_take_turns_with_all_else(world: World) -> None:
    """Forwards without a graph, moves between forwards, a rank that skips or has its own way; rows that one forward
    wrote are read in a later one."""
    engine = Engine(world)
    engine.capture()
    random = np.random.default_rng(11)
    for _ in range(12):
        spans = BATCHES[int(random.integers(len(BATCHES)))]
        kind = str(random.choice(["replay", "mixed", "plain", "skip", "move"], p=[0.4, 0.2, 0.1, 0.15, 0.15]))
        if kind == "move":
            engine.move([9 * PAGE + 3, 2 * PAGE], [2 * PAGE + 7, 9 * PAGE + 1])
        elif kind == "skip" and world.rank == 1:
            engine.refill(spans, writes=False)
            engine.pool.skip_forward()
        elif kind == "skip":
            # Who skips writes nothing, so that nobody may.
            engine.refill(spans, writes=False)
            engine.begin(spans, replays=True)
            engine.pool.end_forward()
            engine.check(spans, chunk=False)
        else:
            engine.forward(spans, replays=kind == "replay" or (kind == "mixed" and world.rank % 2 == 0))


def late_gathers_of_a_replay_leave_chunk_rows_alone(world: World) -> None:
    """Each gather starts late, and brings a page that holds rows of the chunk as well."""
    engine = Engine(world)
    copy = engine.device.copy

    def late(*args: Any) -> None:
        if world.has_cuda:
            with torch.cuda.stream(engine.device._fetch):
                torch.cuda._sleep(5_000_000)
        else:
            engine.device.launch(lambda: time.sleep(0.005))
        copy(*args)

    engine.device.copy = late
    engine.capture()
    for spans in BATCHES[:3]:
        engine.forward(spans)


def rows_of_a_late_owner_are_poison_in_a_replay_too(world: World) -> None:
    """Rank 0 does not say that it has written: the others raise at the end, by its name; the next replay is right."""
    engine = Engine(world, timeout_s=SHORT_S)
    engine.capture()
    is_silent = world.rank == 0
    advance = engine.device.advance
    engine.device.advance = lambda lane, *args: None if is_silent and lane is Lane.COMPUTE else advance(lane, *args)
    engine.refill(BATCHES[0])
    dist.barrier()
    engine.begin(BATCHES[0], replays=True)
    if world.has_cuda:
        torch.cuda.synchronize()
    dist.barrier()
    is_silent = False
    if world.rank:
        error = failure_of(engine.pool.end_forward, SOON_S)
        assert isinstance(error, DeadlineExceeded), error
        assert "shard rank 0" in str(error)
        late = [key for key in engine.keys if not owns(engine.pool, *key)]
        at = engine.places(late[0], slots_of(BATCHES[0][0], PAGE))
        assert (engine.came[late[0]].cpu().numpy().reshape(-1)[at] == POISON).all()
    else:
        engine.pool.end_forward()
    engine.wrote()
    dist.barrier()
    for spans in BATCHES[:3]:
        engine.forward(spans)


def what_a_graph_cannot_do_is_refused(world: World) -> None:
    engine = Engine(world)
    pool, slots = engine.pool, torch.arange(2)
    captured = pool.prepare_capture(engine.keys)
    with pytest.raises(StateError, match="inside the capture"), pool.capturing(captured):
        pass
    with pytest.raises(StateError, match="nothing was captured"):
        pool.begin_forward(BATCHES[0], replay=captured)
    engine.capture()
    with pytest.raises(LayoutError, match="give none"):
        pool.begin_forward(BATCHES[0], engine.keys, replay=engine.captured)
    engine.refill(BATCHES[0])
    engine.begin(BATCHES[0], replays=True)
    foreign = next(key for key in engine.keys if not owns(pool, *key))
    for call in (
        lambda: pool.read(*foreign),
        lambda: pool.write(*foreign, engine.slots, engine.rows[foreign]),
        lambda: pool.move(None, slots, slots),
    ):
        with pytest.raises(StateError, match="made by the replay"):
            call()
    pool.end_forward()
    engine.wrote()
    engine.check(BATCHES[0])
    refused(world, engine, "not inside a CUDA graph", lambda: pool.begin_forward(BATCHES[0]))
    refused(world, engine, "not inside a CUDA graph", lambda: pool.prepare_capture())
    refused(world, engine, "captured for this already", lambda: pool.capturing(engine.captured).__enter__())
    for call in (
        lambda: pool.move(None, slots, slots),
        lambda: pool.restore(*foreign, [1], None),
        lambda: pool.read_compacted(*foreign),
    ):
        refused(world, engine, "cannot be captured", call, foreign)
    if world.has_cuda:
        rows = {name: data[:2] for name, data in engine.rows[foreign].items()}
        refused(world, engine, "never see other values", lambda: pool.write(*foreign, slots, rows), foreign)
    engine.forward(BATCHES[1])


def refused(world: World, engine: Engine, match: str, call: Callable[[], object], key: LayerKey | None = None) -> None:
    """A refusal leaves a capture as it was; with `key` inside of a forward that is captured, which reads that layer."""
    captured = engine.pool.prepare_capture(engine.keys)
    graph = CudaGraph() if world.has_cuda else ThreadGraph(engine.device)
    try:
        with graph.capture(), engine.pool.capturing(captured) if key else contextlib.nullcontext():
            if key:
                engine.pool.read(*key)
            with pytest.raises(StateError, match=match):
                call()
    except RuntimeError as error:
        raise AssertionError(f"the refusal {match!r} ends a capture") from error


def broadcasts_are_not_captured(world: World) -> None:
    engine = Engine(world)
    with pytest.raises(StateError, match="use the peer reader"):
        engine.pool.prepare_capture(engine.keys)
    engine.forward(BATCHES[0], replays=False)


PEER: dict[str, Callable[[World], None]] = {
    one.__name__: one
    for one in (
        one_capture_serves_other_pages_and_counts,
        replays_take_turns_with_all_else,
        late_gathers_of_a_replay_leave_chunk_rows_alone,
        rows_of_a_late_owner_are_poison_in_a_replay_too,
        what_a_graph_cannot_do_is_refused,
    )
}
SCENARIOS: dict[str, Callable[[World], None]] = {
    **PEER,
    broadcasts_are_not_captured.__name__: broadcasts_are_not_captured,
}
