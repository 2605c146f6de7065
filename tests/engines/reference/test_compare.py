"""Verdicts on generations and on page bytes: what counts as equal, what as a tie, and what is named as wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pdlink.errors import InvalidInput
from pdlink.memory.sharded_pool import LayerShardedPool
from pdlink_engines.reference.compare import compare_generations
from pdlink_engines.reference.decode import Generation
from pdlink_engines.reference.page_bytes import collect_pages, differing_pages, digest_pages
from pdlink_engines.reference.shapes import CacheShape

NAN = float("nan")


def generation(*rows: list[float]) -> Generation:
    """Greedy over the given logits, the first row the prompt's."""
    logits = torch.tensor(rows)
    return Generation(tuple(int(one) for one in logits.argmax(dim=1)), logits[1:], logits[0])


def test_close_logits_and_equal_tokens_pass() -> None:
    verdict = compare_generations(generation([0.0, 1.0], [2.0, 0.0]), generation([0.0, 1.0005], [2.0, 0.0]))
    assert verdict.passed
    assert verdict.tokens_equal
    assert verdict.num_steps == 2
    assert verdict.logit_difference == pytest.approx(0.0005, rel=1e-3)


def test_far_logits_fail_though_the_tokens_are_equal() -> None:
    verdict = compare_generations(generation([0.0, 1.0], [2.0, 0.0]), generation([0.0, 1.0], [2.0, 0.01]))
    assert verdict.tokens_equal
    assert not verdict.passed


def test_a_logit_that_is_no_number_fails() -> None:
    found = Generation((1, 0), torch.tensor([[2.0, NAN]]), torch.tensor([0.0, 1.0]))
    assert not compare_generations(generation([0.0, 1.0], [2.0, 0.0]), found).passed


def test_tokens_that_part_at_a_tie_pass_and_the_tie_is_named() -> None:
    expected = generation([0.0, 1.0], [0.5, 0.4998], [9.0, 0.0])
    found = generation([0.0, 1.0], [0.4999, 0.5], [0.0, 9.0])
    verdict = compare_generations(expected, found)
    assert verdict.passed
    assert not verdict.tokens_equal
    assert verdict.num_steps == 2, "what follows other tokens is not compared"
    assert verdict.tie is not None
    assert (verdict.tie.step, verdict.tie.expected_token, verdict.tie.found_token) == (1, 0, 1)
    assert verdict.tie.margin == pytest.approx(0.0002, rel=1e-2)
    assert "a tie at step 1: tokens 0 and 1" in verdict.text


def test_tokens_that_part_without_a_tie_fail() -> None:
    verdict = compare_generations(generation([0.0, 1.0], [0.5, 0.1]), generation([0.0, 1.0], [0.1, 0.5]))
    assert not verdict.passed
    assert verdict.tie is None
    assert "part at step 1" in verdict.text


def test_equal_logits_do_not_excuse_another_token() -> None:
    expected = generation([0.0, 1.0], [5.0, 0.0])
    found = Generation((1, 1), expected.logits, expected.first_logits)
    assert not compare_generations(expected, found).passed


def test_a_generation_that_ends_early_fails() -> None:
    verdict = compare_generations(generation([0.0, 1.0], [5.0, 0.0]), generation([0.0, 1.0]))
    assert not verdict.passed
    assert verdict.parted_at == 1


def test_nothing_to_compare_is_refused() -> None:
    blind = Generation((1,), torch.empty((0, 2)))
    with pytest.raises(InvalidInput, match="share no step"):
        compare_generations(generation([0.0, 1.0]), blind)


SHAPE = CacheShape(num_layers=2, dtype="float32", kv_heads=2, head_dims=1)
"""One byte pattern of 8 bytes a token, layer and component."""


@pytest.fixture
def pool() -> Iterator[LayerShardedPool]:
    layout = SHAPE.layout(4)
    made = LayerShardedPool(layout, {one.name: one.layers for one in layout.components}, 6)
    for index, (component, layer) in enumerate(layout.cells()):
        made.region_tensor(component, layer)[:] = torch.arange(6 * 32).view(6, 32) % 200 + index + 1
    yield made
    made.close()


def test_digests_follow_the_request_and_not_the_page_ids(pool: LayerShardedPool) -> None:
    before = digest_pages(pool, [4, 1], 7)
    for component, layer in pool.layout.cells():
        region = pool.region_tensor(component, layer)
        region[torch.tensor([0, 5])] = region[torch.tensor([4, 1])]
    assert digest_pages(pool, [0, 5], 7) == before
    assert differing_pages(before, digest_pages(pool, [5, 0], 7)) != []


def test_bytes_behind_the_last_token_do_not_count_and_those_before_do(pool: LayerShardedPool) -> None:
    before = digest_pages(pool, [4, 1], 7)
    pool.region_tensor("v", 1)[1, 24:] = 0xAA
    assert differing_pages(before, digest_pages(pool, [4, 1], 7)) == []
    pool.region_tensor("v", 1)[1, 23] = 0xAA
    assert differing_pages(before, digest_pages(pool, [4, 1], 7)) == ["component v layer 1 page 1 differs"]


def test_collecting_does_not_touch_the_pool(pool: LayerShardedPool) -> None:
    kept = pool.region_tensor("k", 0).clone()
    rows = collect_pages(pool, [4, 1], 5)["k", 0]
    assert rows[1].tolist() == [*kept[1, :8].tolist(), *[0] * 24]
    assert pool.region_tensor("k", 0).equal(kept)


def test_pages_wholly_behind_the_last_token_count_as_zero(pool: LayerShardedPool) -> None:
    rows = collect_pages(pool, [4, 1, 2], 4)["k", 0]
    assert rows[0].any()
    assert not rows[1:].any()


def test_a_cell_or_a_page_that_one_side_lacks_differs(pool: LayerShardedPool) -> None:
    whole = digest_pages(pool, [4, 1], 8)
    part = digest_pages(pool, [4, 1], 8, {"k": (0, 1), "v": (0,)})
    assert differing_pages(whole, part) == ["component v layer 1 is on one side only"]
    assert "has 2 pages and 1" in differing_pages(whole, digest_pages(pool, [4], 4))[0]
