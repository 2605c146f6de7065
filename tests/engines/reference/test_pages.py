"""The page table: no page has two owners, prefixes are shared page by page, and old prefixes make room."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from pdlink.errors import InvalidInput, StateError
from pdlink_engines.reference.pages import PageTable

PAGE_SIZE = 4


def filled(table: PageTable, tokens: list[int]) -> tuple[int, ...]:
    """Take pages for a prompt, as the engine does, and let others share the full ones."""
    shared = table.share(tokens)
    fresh = table.allocate(table.pages_for(len(tokens)) - len(shared))
    assert fresh is not None
    pages = shared + fresh
    table.remember(tokens, pages[: len(tokens) // PAGE_SIZE])
    return pages


def test_pages_are_handed_out_in_the_given_order() -> None:
    assert PageTable([5, 1, 3], PAGE_SIZE).allocate(3) == (5, 1, 3)


def test_too_few_pages_give_none_at_all() -> None:
    table = PageTable(range(3), PAGE_SIZE)
    assert table.allocate(4) is None
    assert table.allocate(3) == (0, 1, 2)


def test_a_prefix_is_shared_up_to_the_first_page_that_differs() -> None:
    table = PageTable(range(9), PAGE_SIZE)
    first = filled(table, [*range(12), 99])
    assert table.share([*range(8), 50, 51, 52, 53, 54]) == first[:2]


def test_an_equal_page_after_another_beginning_is_not_shared() -> None:
    table = PageTable(range(9), PAGE_SIZE)
    filled(table, [*range(8), 99])
    assert table.share([7, 7, 7, 7, 4, 5, 6, 7, 99]) == ()


def test_the_last_token_of_a_prompt_is_never_taken_from_another() -> None:
    table = PageTable(range(9), PAGE_SIZE)
    first = filled(table, [*range(8)])
    assert len(first) == 2
    assert table.share([*range(8)]) == first[:1]


def test_tokens_whose_digits_run_together_alike_are_told_apart() -> None:
    table = PageTable(range(9), PAGE_SIZE)
    filled(table, [1, 23, 4, 5, 0])
    assert table.share([12, 3, 4, 5, 0]) == ()


def test_an_unused_prefix_is_kept_until_its_page_is_needed_and_then_forgotten() -> None:
    table = PageTable(range(3), PAGE_SIZE)
    tokens = [*range(8), 99]
    pages = filled(table, tokens)
    table.release(pages)
    assert table.num_available == 3
    assert table.share(tokens) == pages[:2]
    table.release(pages[:2])
    assert table.allocate(3) is not None
    assert table.share(tokens) == ()


def test_the_longest_unused_prefix_goes_first() -> None:
    table = PageTable(range(2), PAGE_SIZE)
    one, two = [1, 1, 1, 1], [2, 2, 2, 2]
    pages_one, pages_two = filled(table, one), filled(table, two)
    table.release(pages_two)
    table.release(pages_one)
    assert table.allocate(1) == pages_two
    assert table.share([*one, 0]) == pages_one


def test_a_shared_page_is_free_only_after_its_last_user() -> None:
    table = PageTable(range(3), PAGE_SIZE)
    tokens = [*range(4), 99]
    first = filled(table, tokens)
    second = filled(table, tokens)
    assert second[0] == first[0]
    table.release(first)
    assert table.num_available == 1
    table.release(second)
    assert table.num_available == 3


def test_a_page_released_once_too_often_is_refused() -> None:
    table = PageTable(range(2), PAGE_SIZE)
    pages = table.allocate(1)
    assert pages is not None
    table.release(pages)
    with pytest.raises(StateError, match="page 0 is released"):
        table.release(pages)


def test_a_page_named_twice_is_refused() -> None:
    with pytest.raises(InvalidInput, match="twice"):
        PageTable([1, 2, 1], PAGE_SIZE)


class PageTableMachine(RuleBasedStateMachine):
    """Prompts over two tokens, so that prefixes collide often, in a pool that is soon full."""

    requests: Bundle[tuple[tuple[int, ...], tuple[int, ...]]] = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(range(7), PAGE_SIZE)
        self.users = [0] * 7
        self.content: dict[int, tuple[int, ...]] = {}

    @rule(target=requests, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20).map(tuple))
    def submit(self, tokens: tuple[int, ...]) -> object:
        shared = self.table.share(tokens)
        assert len(shared) * PAGE_SIZE < len(tokens)
        for index, page in enumerate(shared):
            assert self.content[page] == tokens[: (index + 1) * PAGE_SIZE]
        needed = self.table.pages_for(len(tokens)) - len(shared)
        available = self.table.num_available
        fresh = self.table.allocate(needed)
        assert (fresh is None) == (needed > available)
        if fresh is None:
            self.table.release(shared)
            return multiple()
        assert all(self.users[page] == 0 for page in fresh)
        for page in fresh:
            self.content.pop(page, None)
        pages = shared + fresh
        for page in pages:
            self.users[page] += 1
        full = len(tokens) // PAGE_SIZE
        self.table.remember(tokens, pages[:full])
        self.content.update((page, tokens[: (index + 1) * PAGE_SIZE]) for index, page in enumerate(pages[:full]))
        return tokens, pages

    @rule(request=consumes(requests))
    def finish(self, request: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        for page in request[1]:
            self.users[page] -= 1
        self.table.release(request[1])

    @invariant()
    def every_page_is_in_use_or_available(self) -> None:
        assert self.table.num_available == self.users.count(0)


TestPageTableMachine = PageTableMachine.TestCase
TestPageTableMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
