"""Shares of a chunk: every token has one rank, and gathered rows return to token order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.errors import InvalidInput
from pdlink_engines.reference.interleave import ChunkShares

chunks = st.builds(ChunkShares, start=st.integers(0, 200), num_tokens=st.integers(1, 60), cp_size=st.integers(1, 9))


@given(chunks)
def test_each_position_belongs_to_one_rank_by_its_residue(shares: ChunkShares) -> None:
    found = [(one, rank) for rank in range(shares.cp_size) for one in shares.positions(rank)]
    assert sorted(one for one, _ in found) == list(range(shares.start, shares.end))
    assert all(one % shares.cp_size == rank == shares.holder(one) for one, rank in found)


@given(chunks)
def test_all_ranks_compute_equally_many_rows_and_at_most_one_more_than_they_must(shares: ChunkShares) -> None:
    for rank in range(shares.cp_size):
        padded = shares.padded_positions(rank)
        own = shares.positions(rank)
        assert len(padded) == shares.padded
        assert padded[: len(own)] == own
        assert len(padded) - len(own) <= 1
        assert all(shares.start <= one < shares.end for one in padded)


@given(chunks)
def test_gathered_rows_return_to_token_order_without_the_padding(shares: ChunkShares) -> None:
    gathered: list[int | None] = []
    for rank in range(shares.cp_size):
        own = shares.positions(rank)
        gathered += [*own, *[None] * (shares.padded - len(own))]
    assert [gathered[row] for row in shares.natural_order()] == list(range(shares.start, shares.end))


@given(chunks)
def test_the_row_of_the_last_position_is_found_on_its_holder(shares: ChunkShares) -> None:
    last = shares.end - 1
    assert shares.padded_positions(shares.holder(last))[shares.row(last)] == last


@pytest.mark.parametrize(("start", "num_tokens", "cp_size"), [(-1, 1, 1), (0, 0, 1), (0, 1, 0)])
def test_a_chunk_of_nothing_is_refused(start: int, num_tokens: int, cp_size: int) -> None:
    with pytest.raises(InvalidInput, match=f"got {start}, {num_tokens} and {cp_size}"):
        ChunkShares(start, num_tokens, cp_size)
