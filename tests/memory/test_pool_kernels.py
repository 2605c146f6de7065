"""How pages are cut for the kernels of a pool, and what a lane's trouble is told as."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.backends.cuda_kernels import CHUNK_BYTES, WORD_BYTES
from pdlink.backends.pool_kernels import MAX_RANKS, STAMP_WORDS, Cut, _both
from pdlink.errors import DeadlineExceeded, IntegrityError, InvalidInput
from pdlink.memory.device_boards import explain
from pdlink.memory.lockstep import NUM_WORDS
from pdlink.memory.pool_device import Trouble, TroubleKind


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(1, 1 << 22))
def test_units_cover_a_page_once_and_fit_a_block(source: int, target: int, page_bytes: int) -> None:
    cut = Cut.of(source, target, page_bytes)
    assert cut.word_bytes in WORD_BYTES
    assert not any(one % cut.word_bytes for one in (source, target, page_bytes, cut.unit_bytes))
    assert cut.unit_bytes <= CHUNK_BYTES
    assert (cut.units_per_page - 1) * cut.unit_bytes < page_bytes <= cut.units_per_page * cut.unit_bytes


@pytest.mark.parametrize(
    ("page_bytes", "word", "units"),
    [(64 * 656, 16, 2), (64 * 132, 16, 1), (64 * 1152, 16, 3), (7 * 30, 1, 1), (4, 4, 1)],
)
def test_pages_of_known_formats_are_copied_by_wide_words(page_bytes: int, word: int, units: int) -> None:
    cut = Cut.of(1 << 20, 3 << 20, page_bytes)
    assert (cut.word_bytes, cut.units_per_page) == (word, units)


def test_a_stamp_has_room_for_a_record() -> None:
    assert NUM_WORDS <= STAMP_WORDS


def test_words_and_ranks_lie_where_the_kernel_looks() -> None:
    both = _both([10, 20], [1, 3])
    assert both[:2] == [10, 20]
    assert both[MAX_RANKS:] == [1, 3]
    with pytest.raises(InvalidInput, match="more than"):
        _both([1] * (MAX_RANKS + 1), [0] * (MAX_RANKS + 1))


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        (TroubleKind.LATE, DeadlineExceeded, "stayed at epoch 7 and was to reach 9"),
        (TroubleKind.TRAILER, IntegrityError, "communicator does not work"),
        (TroubleKind.OVERWRITTEN, IntegrityError, "may still have been reading"),
    ],
)
def test_trouble_names_the_rank(kind: TroubleKind, error: type[Exception], words: str) -> None:
    told = explain(Trouble(kind, 1, 9, 7), "the end", (4, 6))
    assert isinstance(told, error)
    assert words in str(told)
    assert "shard rank 1 (global rank 6)" in str(told)
