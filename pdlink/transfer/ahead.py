"""Owns the rule by which both sides know the pieces that an owner stages unasked: their numbers and their cut. No I/O.

A reader says how large its pieces are, and what it holds of pages that it does not take whole; an owner that announces
a publication to it may pack the first of these at once, and says of how many it does so. Nothing else has to be said,
because both cut alike and number alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdlink.errors import PlanError
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.packing import Piece, cut

FIRST_TICKET = 1 << 63
"""Tickets from here on are the owner's to give; readers count theirs from 1."""
INDEX_BITS = 8
MAX_PIECES = 1 << INDEX_BITS
MAX_CUT = 1 << 12
"""A cut into about this many pieces is the finest: an owner makes it for whoever says so."""
MAX_SEQUENCE = (1 << (63 - INDEX_BITS)) - 1


@dataclass(frozen=True, slots=True)
class Ahead:
    """Pieces that are staged unasked: how large they are cut, and how many of them there are (at most)."""

    piece_bytes: int
    num_pieces: int


def ahead_ticket(sequence: int, index: int) -> int:
    """The ticket of piece `index` of the publication `sequence`."""
    return FIRST_TICKET | sequence << INDEX_BITS | index


def is_ahead(ticket: int) -> bool:
    return ticket >= FIRST_TICKET


def cut_ahead(page_bytes: Int64Array, num_pages: int, ahead: Ahead) -> list[Piece]:
    """The cut of a pull of which pieces may be staged unasked: rows (int64 [n] of page bytes) in packing order x
    `num_pages`. Empty where these cannot be cut so."""
    if int(page_bytes.sum()) * num_pages > MAX_CUT * ahead.piece_bytes:
        return []
    try:
        return cut(page_bytes, num_pages, ahead.piece_bytes)
    except PlanError:
        return []
