"""Owns random forwards: every rank keeps the whole cache in plain arrays beside its pool and compares what it reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from pdlink.layout import CacheLayout
from pdlink.memory.forward import LayerKey, ReadSpan
from tests.memory.rank_world import (
    World,
    all_fields,
    chunk_fields,
    dsa_layout,
    gqa_layout,
    owns,
    pattern,
    rows_of,
    slots_of,
)
from tests.memory.scenarios_bytes import put_rows

NUM_PAGES = 12
SMALL = 4


class Model:
    """A pool that is split over nobody, and the rows of each layer that a read in this forward must have right."""

    def __init__(self, world: World, layout: CacheLayout, seed: int, scratch_slots: int) -> None:
        # Ranks that gather for themselves may each read what they like.
        self.own = np.random.default_rng([seed, world.rank]) if world.kind == "peer" else None
        self.layout = layout
        self.pool = world.pool(layout, NUM_PAGES, scratch_slots=scratch_slots)
        self.random = np.random.default_rng(seed)
        self.keys = list(layout.cells())
        self.truth = {key: pattern(*key, (NUM_PAGES, layout.component(key[0]).page_bytes)) for key in self.keys}
        self.size = layout.components[0].page_size
        self.valid: dict[LayerKey, set[int]] | None = None
        self.chunk = np.empty(0, np.int64)
        self.salt = 0

    def run(self, num_forwards: int, num_calls: int) -> None:
        for _ in range(num_forwards):
            self.between()
            self.begin()
            for _ in range(num_calls):
                self.call()
            self.pool.end_forward()
            self.valid = None
        for key in self.keys:
            if owns(self.pool, *key):
                assert np.array_equal(self.pool.region_tensor(*key).cpu().numpy(), self.truth[key]), key

    def begin(self) -> None:
        pages = self.random.permutation(NUM_PAGES)
        spans, chunks = [], []
        for table in np.split(pages, [4, 7]):
            prefix = int(self.random.integers(0, (len(table) - 1) * self.size + 1))
            spans.append(ReadSpan(table.tolist(), prefix))
            end = min(prefix + int(self.random.integers(0, 2 * self.size)), len(table) * self.size)
            chunks.append(slots_of(ReadSpan(table.tolist(), end), self.size, prefix))
        self.prefix = np.concatenate([slots_of(span, self.size) for span in spans])
        self.chunk = np.concatenate(chunks)
        self.valid = {key: set(self.prefix.tolist()) for key in self.keys}
        # With an order, which the random reads leave soon, and without.
        order = self.random.permutation(len(self.keys)) if self.random.random() < 0.5 else []
        self.pool.begin_forward(spans, [self.keys[index] for index in order])
        for index in order[: int(self.random.integers(0, 4))]:
            self.check(self.keys[index], self.pool.read(*self.keys[index]), self.prefix)

    def between(self) -> None:
        for _ in range(int(self.random.integers(0, 3))):
            self.random.choice([self.move, self.restore, self.write_history])()  # type: ignore[arg-type]

    def call(self) -> None:
        calls = [self.read, self.compact, self.write_chunk, self.write_history, self.move, self.restore, self.rows]
        self.random.choice(calls, p=[0.34, 0.1, 0.3, 0.05, 0.05, 0.06, 0.1])()  # type: ignore[arg-type]
        if self.own and self.own.random() < 0.5:
            self.read()

    def key(self) -> LayerKey:
        return self.keys[int(self.random.integers(len(self.keys)))]

    def key_to_read(self) -> LayerKey:
        return self.keys[int((self.own or self.random).integers(len(self.keys)))]

    def check(self, key: LayerKey, pages: torch.Tensor, slots: np.ndarray) -> None:
        came = rows_of(pages, self.layout, key[0], slots)
        assert np.array_equal(came, rows_of(self.truth[key], self.layout, key[0], slots)), key

    def read(self) -> None:
        key = self.key_to_read()
        assert self.valid is not None
        self.check(key, self.pool.read(*key), np.array(sorted(self.valid[key]), np.int64))

    def compact(self) -> None:
        key = self.key()
        pages, remap = (one.cpu() for one in self.pool.read_compacted(*key))
        spread = torch.zeros((NUM_PAGES, pages.shape[1]), dtype=torch.uint8)
        spread[remap >= 0] = pages[remap[remap >= 0]]
        assert set((self.prefix // self.size).tolist()) == set(torch.nonzero(remap >= 0).flatten().tolist())
        self.check(key, spread, self.prefix)

    def rows(self) -> None:
        key = self.key()
        assert self.valid is not None
        slots = self.pick(np.array(sorted(self.valid[key]), np.int64), 9)
        for field in self.layout.component(key[0]).fields:
            came = self.pool.rows(*key, field.name, torch.from_numpy(slots))
            start = sum(one.token_bytes for one in self.layout.component(key[0]).fields if one.offset < field.offset)
            want = rows_of(self.truth[key], self.layout, key[0], slots)
            assert np.array_equal(came.cpu().numpy(), want[:, start : start + field.token_bytes].reshape(came.shape))

    def pick(self, slots: np.ndarray, limit: int) -> np.ndarray:
        count = int(self.random.integers(0, min(limit, len(slots)) + 1))
        return np.sort(self.random.choice(slots, count, replace=False)) if count else np.empty(0, np.int64)

    def write(self, slots: np.ndarray) -> None:
        key, slots = self.key(), self.random.permutation(slots)
        self.salt += 1
        fields = chunk_fields(self.layout, key[0], len(slots), self.salt)
        self.pool.write(*key, torch.from_numpy(slots), fields)
        put_rows(self.truth[key], self.layout, key[0], slots, all_fields(fields))
        if self.valid is not None:
            self.valid[key] |= set(slots.tolist())

    def write_chunk(self) -> None:
        self.write(self.pick(self.chunk, 30))

    def write_history(self) -> None:
        self.write(self.pick(np.arange(NUM_PAGES * self.size), 5))

    def move(self) -> None:
        every = np.arange(NUM_PAGES * self.size)
        count = int(self.random.integers(0, 8))
        source, target = self.random.choice(every, count), self.random.choice(every, count, replace=False)
        names = [self.key()[0]] if self.random.random() < 0.5 else [one.name for one in self.layout.components]
        self.pool.move(names[0] if len(names) == 1 else None, torch.from_numpy(source), torch.from_numpy(target))
        for key in self.keys:
            if key[0] in names and count:
                rows = rows_of(self.truth[key], self.layout, key[0], source)
                put_rows(self.truth[key], self.layout, key[0], target, rows)
                if self.valid is not None:
                    self.valid[key] |= set(target.tolist())

    def restore(self) -> None:
        key = self.key()
        pages = self.random.choice(NUM_PAGES, int(self.random.integers(1, 3)), replace=False)
        self.salt += 1
        data = pattern(*key, (len(pages), self.layout.component(key[0]).page_bytes), self.salt)
        mine = owns(self.pool, *key)
        self.pool.restore(*key, pages.tolist(), torch.from_numpy(data) if mine else None)
        if mine:
            assert torch.equal(self.pool.backup(*key, pages.tolist()).cpu(), torch.from_numpy(data))
        self.truth[key][pages] = data
        if self.valid is not None:
            self.valid[key] |= set((pages[:, None] * self.size + np.arange(self.size)).reshape(-1).tolist())


def random_forwards(world: World, layout: CacheLayout, seed: int) -> None:
    Model(world, layout, seed, scratch_slots=2 + seed % 2).run(num_forwards=4, num_calls=30)


SCENARIOS: dict[str, Callable[[World], None]] = {
    **{f"random_forwards_dsa_{seed}": partial(random_forwards, layout=dsa_layout(6), seed=seed) for seed in range(4)},
    **{f"random_forwards_gqa_{seed}": partial(random_forwards, layout=gqa_layout(5), seed=seed) for seed in range(8)},
}
