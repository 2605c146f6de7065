"""Attention split by heads gives what the whole does. Ranks are threads here; the demo runs them as processes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pdlink.errors import InvalidInput
from pdlink.memory.sharded_pool import LayerShardedPool
from pdlink_engines.reference.compare import compare_generations
from pdlink_engines.reference.decode import generate
from pdlink_engines.reference.gather import CpGroup
from pdlink_engines.reference.models import ReferenceModel, model_heads
from pdlink_engines.reference.prefill import PrefillEngine
from pdlink_engines.reference.shapes import head_range
from pdlink_engines.reference.tensor_parallel import TpGroup, split_layers

PAGE_SIZE = 16
NUM_PAGES = 6
NEW_TOKENS = 3
PROMPT = "Heads of one layer are split over ranks, which add up what each of them makes of it."
MEET_TIMEOUT_S = 120.0

pytestmark = pytest.mark.timeout(300)


class Meeting:
    """Where `size` threads exchange tensors, in rank order."""

    def __init__(self, size: int) -> None:
        self.values: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=MEET_TIMEOUT_S)


class ThreadGroup(TpGroup):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.group, self.size, self.rank, self._meeting = None, len(meeting.values), rank, meeting

    def stack(self, values: torch.Tensor, what: str) -> torch.Tensor:
        self._meeting.values[self.rank] = values
        self._meeting.barrier.wait()
        every = torch.stack(self._meeting.values)
        self._meeting.barrier.wait()
        return every


def whole_pool(model: ReferenceModel) -> LayerShardedPool:
    layout = model.layout(PAGE_SIZE)
    return LayerShardedPool(layout, {one.name: one.layers for one in layout.components}, NUM_PAGES)


def rank_pool(model: ReferenceModel, whole: LayerShardedPool, size: int, rank: int) -> LayerShardedPool:
    """A pool with the heads of one rank, copied out of one that has all."""
    shape = model.shape
    kept = head_range(shape.kv_heads, size, rank) if shape.kv_heads else None
    layout = shape.layout(PAGE_SIZE, kept)
    pool = LayerShardedPool(layout, {one.name: one.layers for one in layout.components}, NUM_PAGES)
    for name, layer in layout.cells():
        rows = whole.region_tensor(name, layer)
        if kept is not None:
            rows = rows.view(NUM_PAGES, PAGE_SIZE, shape.kv_heads, -1)[:, :, kept.start : kept.stop].flatten(1)
        pool.region_tensor(name, layer).copy_(rows)
    return pool


def pages_of(model: ReferenceModel, prompt: Sequence[int], pool: LayerShardedPool) -> tuple[list[int], int]:
    """Prefill `prompt` into `pool`; its pages, with those for new tokens, and the first token."""
    engine = PrefillEngine(model, pool, CpGroup(), chunk_tokens=32, on_pages=lambda pages: None)
    engine.submit("a", prompt)
    (result,) = engine.run()
    rest = [page for page in range(NUM_PAGES) if page not in result.page_ids]
    return [*result.page_ids, *rest], result.first_token


@pytest.mark.parametrize(
    ("name", "size"), [("tiny", 3), *(pytest.param("smollm2", size, marks=pytest.mark.slow) for size in (2, 3))]
)
def test_ranks_with_some_heads_each_generate_what_one_with_all_does(
    request: pytest.FixtureRequest, name: str, size: int
) -> None:
    model: ReferenceModel = request.getfixturevalue(name)
    prompt = model.tokenizer.encode(PROMPT)[:60]
    whole = whole_pool(model)
    pages, first_token = pages_of(model, prompt, whole)
    meeting = Meeting(size)
    pools = [rank_pool(model, whole, size, rank) for rank in range(size)]

    def run(rank: int) -> object:
        group = ThreadGroup(meeting, rank)
        return generate(model, pools[rank], pages, prompt, first_token, max_new_tokens=NEW_TOKENS, group=group)

    expected = generate(model, whole, pages, prompt, first_token, max_new_tokens=NEW_TOKENS)
    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(run, range(size)))
    assert expected.logits.shape[0] == NEW_TOKENS - 1
    for one in found:
        verdict = compare_generations(expected, one)
        assert verdict.tokens_equal, verdict.text
        assert verdict.logit_difference <= 1e-3, verdict.text
        assert one.logits.equal(found[0].logits), "all ranks have equal bits"
    for pool in (*pools, whole):
        pool.close()


@pytest.mark.parametrize("name", ["tiny", "smollm2"])
def test_more_ranks_than_heads_are_refused(request: pytest.FixtureRequest, name: str) -> None:
    model: ReferenceModel = request.getfixturevalue(name)
    num_heads = model_heads(model.name)
    with pytest.raises(InvalidInput, match=f"tp {num_heads + 1} is more than the {num_heads} heads"):
        split_layers(model, ThreadGroup(Meeting(num_heads + 1), 0))


def test_splitting_leaves_the_model_as_it_was(tiny: ReferenceModel) -> None:
    before = [layer.self_attn.o_proj for layer in tiny.network.model.layers]
    split = split_layers(tiny, ThreadGroup(Meeting(2), 1))
    assert split is not None
    assert [layer.self_attn.o_proj for layer in tiny.network.model.layers] == before
    assert all(mine.self_attn.o_proj is not old for mine, old in zip(split, before, strict=True))
    # No weight is copied: a slice lies in the memory of the whole.
    whole = tiny.network.model.layers[0].self_attn.kv_b_proj.weight
    part = split[0].self_attn.kv_b_proj.weight
    assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert part.shape[0] * 2 == whole.shape[0]
