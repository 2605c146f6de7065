"""Both sides know the pieces that are staged unasked without a word about them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pdlink.transfer.ahead import (
    MAX_CUT,
    MAX_PIECES,
    MAX_SEQUENCE,
    Ahead,
    ahead_ticket,
    cut_ahead,
    is_ahead,
)

PLACES = st.tuples(st.integers(0, MAX_SEQUENCE), st.integers(0, MAX_PIECES - 1))


@given(st.lists(PLACES, unique=True, max_size=20))
def test_every_piece_of_every_publication_has_a_ticket_of_its_own_that_no_reader_counts_up_to(
    places: list[tuple[int, int]],
) -> None:
    tickets = {ahead_ticket(*place) for place in places}
    assert len(tickets) == len(places)
    assert all(is_ahead(ticket) and ticket < 1 << 64 for ticket in tickets)
    assert not is_ahead(1 << 62)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 12), st.integers(0, 400))
def test_a_cut_is_whole_or_nothing(sizes: list[int], num_pages: int, piece_bytes: int) -> None:
    pieces = cut_ahead(np.array(sizes, dtype=np.int64), num_pages, Ahead(piece_bytes, 2))
    assert sum(one.nbytes for one in pieces) in (0, sum(sizes) * num_pages)
    assert bool(pieces) == (max(sizes) <= piece_bytes)
    assert all(one.nbytes <= piece_bytes for one in pieces)


def test_nobody_has_a_cut_made_of_more_pieces_than_some() -> None:
    rows = np.full(4, 10, dtype=np.int64)
    assert len(cut_ahead(rows, MAX_CUT // 4, Ahead(10, 1))) == MAX_CUT
    assert cut_ahead(rows, MAX_CUT // 4 + 1, Ahead(10, 1)) == []
