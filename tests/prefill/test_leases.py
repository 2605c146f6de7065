"""What a prefill worker remembers for a limited time."""

from __future__ import annotations

from pdlink.prefill.leases import ExpiringBook


def test_an_entry_is_forgotten_when_its_time_is_over() -> None:
    book: ExpiringBook[str, int] = ExpiringBook(10.0, 8)
    book.put("a", 1, 0.0)
    assert book.get("a", 9.9) == 1
    assert book.get("a", 10.0) is None
    assert book.expire(10.0) == 1
    assert len(book) == 0


def test_an_entry_lives_on_while_it_is_asked_for() -> None:
    """Repeats of a frame that has been answered must not be taken for a new one in the middle of them."""
    book: ExpiringBook[str, int] = ExpiringBook(10.0, 8)
    book.put("a", 1, 0.0)
    for now in range(0, 100, 9):
        assert book.renew("a", now) == 1
        book.expire(now)
    assert book.renew("a", 120.0) is None
    assert book.renew("b", 0.0) is None


def test_of_too_many_entries_those_go_that_were_not_put_or_renewed_for_longest() -> None:
    book: ExpiringBook[str, int] = ExpiringBook(10.0, 2)
    for number, name in enumerate("ab"):
        book.put(name, number + 1, 0.0)
    book.renew("a", 1.0)
    book.put("c", 3, 1.0)
    assert [book.get(name, 1.0) for name in "abc"] == [1, None, 3]
