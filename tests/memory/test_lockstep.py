"""Records of steps: they survive the wire, nothing else is taken for one, and a rank that differs is named."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.memory.lockstep import (
    NUM_WORDS,
    RECORD_MAGIC,
    TRAILER_MAGIC,
    Step,
    StepKind,
    excuse,
    find_divergence,
    unpack,
)

WORD = st.integers(-1, (1 << 63) - 1)
STEPS = st.builds(Step, st.sampled_from(StepKind), WORD, WORD, WORD, WORD, WORD, WORD, WORD, WORD)
NAMES = ["index_k", "latent"]
READ = Step(StepKind.READ, 7, 3, 1, 5, 2, 11)


@given(STEPS, st.sampled_from([RECORD_MAGIC, TRAILER_MAGIC]))
def test_a_record_comes_back_as_it_was(step: Step, magic: int) -> None:
    words = step.pack(magic)
    assert words.dtype == np.int64
    assert len(words) == NUM_WORDS
    assert unpack(words, magic) == step


@given(STEPS, st.integers(0, NUM_WORDS - 1), st.integers(0, 63))
def test_a_record_with_a_wrong_bit_is_none(step: Step, word: int, bit: int) -> None:
    words = step.pack()
    words.view(np.uint64)[word] ^= np.uint64(1 << bit)
    assert unpack(words) is None


@pytest.mark.parametrize("byte", [0x00, 0xEE, 0xFF])
def test_bytes_that_nobody_wrote_are_no_record(byte: int) -> None:
    assert unpack(np.full(NUM_WORDS * 8, byte, np.uint8).view(np.int64)) is None


def test_a_trailer_is_not_a_record() -> None:
    assert unpack(READ.pack(TRAILER_MAGIC)) is None


@given(st.lists(STEPS, min_size=1, max_size=1), st.integers(1, 5))
def test_equal_records_agree(steps: list[Step], num_ranks: int) -> None:
    if steps[0].kind is not StepKind.FAILED:
        assert find_divergence(steps * num_ranks, list(range(num_ranks)), NAMES) is None


@given(
    st.integers(2, 6), st.data(), st.sampled_from([one.name for one in dataclasses.fields(Step) if one.name != "kind"])
)
def test_the_rank_that_differs_is_named_whatever_differs(num_ranks: int, data: st.DataObject, name: str) -> None:
    odd = data.draw(st.integers(1 if num_ranks == 2 else 0, num_ranks - 1))
    steps: list[Step | None] = [READ] * num_ranks
    steps[odd] = dataclasses.replace(READ, **{name: getattr(READ, name) + 1})
    found = find_divergence(steps, [10 * rank for rank in range(num_ranks)], NAMES)
    assert found is not None
    assert found.startswith(f"shard rank {odd} (global rank {10 * odd}) is at ")
    assert "no difference" not in found


def test_the_sentence_says_what_each_side_does() -> None:
    other = dataclasses.replace(READ, component=0, layer=2)
    assert find_divergence([READ, other, READ], [0, 2, 4], NAMES) == (
        "shard rank 1 (global rank 2) is at the read of 'index_k' layer 2 in forward 7 while shard rank 0 (global rank "
        "0) is at the read of 'latent' layer 5 in forward 7 (different layers: 0 and 1); all ranks must make the same "
        "calls"
    )


def test_a_rank_that_failed_is_named_before_any_other_difference() -> None:
    failed = Step(StepKind.FAILED, 7, 3, 1, 5)
    end = Step(StepKind.END, 7, 2)
    assert find_divergence([end, READ, failed], [0, 1, 2], NAMES) == (
        "shard rank 2 (global rank 2) failed to read 'latent' layer 5 in forward 7; its own error says why"
    )


def test_a_rank_without_a_record_is_named() -> None:
    found = find_divergence([READ, None], [3, 4], NAMES)
    assert found == "shard rank 1 (global rank 4) sent no record: its communicator moves nothing"


BEGIN = Step(StepKind.BEGIN, 7, num_pages=3, pages_digest=11, order_digest=5, setup_digest=9, changes=2)


@pytest.mark.parametrize(
    "other",
    [
        Step(StepKind.SKIP, 7, setup_digest=9, changes=-1),
        Step(StepKind.BEGIN, 7, pages_digest=1, setup_digest=9, changes=2),
        dataclasses.replace(BEGIN, changes=-1),
    ],
)
def test_a_rank_without_work_is_excused_wherever_it_is(other: Step) -> None:
    for steps in ([other, BEGIN, BEGIN], [BEGIN, other], [other, other, BEGIN], [other, other]):
        assert find_divergence(excuse(steps), list(range(len(steps))), NAMES) is None


@pytest.mark.parametrize("name", ["forward", "setup_digest", "pages_digest", "num_pages", "order_digest", "changes"])
def test_what_is_not_excused_is_found(name: str) -> None:
    odd = dataclasses.replace(BEGIN, **{name: getattr(BEGIN, name) + 1})
    found = find_divergence(excuse([BEGIN, BEGIN, odd]), [0, 1, 2], NAMES)
    assert found is not None
    assert found.startswith("shard rank 2")


@pytest.mark.parametrize("kind", [StepKind.SKIP, StepKind.BEGIN])
@pytest.mark.parametrize("name", ["forward", "setup_digest"])
def test_a_rank_without_work_has_to_be_of_the_same_pool_and_forward(kind: StepKind, name: str) -> None:
    odd = Step(kind, 7, setup_digest=9, changes=-1 if kind is StepKind.SKIP else 2)
    odd = dataclasses.replace(odd, **{name: getattr(odd, name) + 1})
    found = find_divergence(excuse([BEGIN, BEGIN, odd]), [0, 1, 2], NAMES)
    assert found is not None
    assert found.startswith("shard rank 2")


def test_a_failed_rank_is_not_excused() -> None:
    found = find_divergence(excuse([BEGIN, Step(StepKind.FAILED, 7)]), [0, 1], NAMES)
    assert found == "shard rank 1 (global rank 1) failed in forward 7; its own error says why"
