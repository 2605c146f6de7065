"""Early frames are bounded over all requests, and a flood of one peer takes no other peer's place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdlink.layout.readers import ReaderSet
from pdlink.prefill.early_book import EarlyBook
from tests.prefill.rig import SOLO, subscribe

TTL_S = 10.0


def num_frames(book: EarlyBook) -> int:
    return sum(entry.early.num_frames for entry in book._entries.values())


def test_a_flood_of_one_peer_pushes_out_its_own_frames_only() -> None:
    book = EarlyBook(TTL_S, 100)
    for number in range(50):
        book.keep(f"good{number}", b"good%d" % number, 1, subscribe(SOLO), 0.0)
    for number in range(1000):
        book.keep(f"flood{number}", b"flood", 1, subscribe(SOLO), 0.0)
    assert num_frames(book) == 100
    assert book.num_dropped == 950
    assert all(book.take(f"good{number}", 0.0) for number in range(50))
    assert [number for number in range(1000) if book.take(f"flood{number}", 0.0)] == list(range(950, 1000))


def test_a_peer_that_has_little_takes_the_place_of_whoever_has_most() -> None:
    book = EarlyBook(TTL_S, 10)
    for number in range(10):
        book.keep(f"flood{number}", b"flood", 1, subscribe(SOLO), 0.0)
    book.keep("good", b"good", 1, subscribe(SOLO), 0.0)
    assert book.take("flood0", 0.0) is None
    assert book.take("flood1", 0.0)
    assert book.take("good", 0.0)


def test_many_readers_of_one_request_count_each() -> None:
    book = EarlyBook(TTL_S, 10)
    for index in range(8):
        book.keep("wide", b"x", 1, subscribe(ReaderSet("dec", index, 8)), 0.0)
    for number in range(4):
        book.keep(f"t{number}", b"y", 1, subscribe(SOLO), 0.0)
    assert book.take("wide", 0.0) is None
    assert len(book) == 4


Step = tuple[str, int, int, float]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("keep", "drop", "take", "expire")), st.integers(0, 6), st.integers(0, 3), st.floats(0, 4)
        )
    )
)
def test_the_counts_are_those_of_what_is_kept_whatever_happens(steps: list[Step]) -> None:
    book, now = EarlyBook(TTL_S, 5), 0.0
    for what, who, attempt, wait_s in steps:
        now += wait_s
        transfer_id, readers = f"t{who}", ReaderSet("dec", attempt, 4)
        if what == "keep":
            book.keep(transfer_id, b"%d" % (who % 3), attempt, subscribe(readers), now)
        elif what == "drop":
            book.drop(transfer_id, readers, attempt)
        elif what == "take":
            book.take(transfer_id, now)
        else:
            book.expire(now)
        assert book._num_frames == num_frames(book)
        assert sum(book._shares.values()) == book._num_frames
        assert {one for ids in book._routes.values() for one in ids} == set(book._entries)
        assert book._num_frames <= 5 or len(book) == 1
    book.expire(now + TTL_S)
    assert (len(book), book._num_frames, book._routes, book._shares) == (0, 0, {}, {})
