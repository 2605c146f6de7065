"""What an engine may ask for: pages that fit the tokens, the groups and the pool."""

from __future__ import annotations

import pytest

from pdlink.decode.request import ReceiveRequest, build_request
from pdlink.errors import InvalidInput
from pdlink.layout.readers import ReaderSet
from tests.decode.rig import PAGE_SIZE, make_layout

LAYOUT = make_layout(2)


def ask(pages: list[int], num_tokens: int, prefix_tokens: int = 0, transfer_id: str = "t") -> ReceiveRequest:
    return build_request(
        LAYOUT,
        transfer_id,
        {"kv": pages},
        num_tokens,
        prefix_tokens=prefix_tokens,
        readers=ReaderSet("dec"),
        pool_pages={"kv": 16},
    )


@pytest.mark.parametrize(
    ("num_tokens", "prefix_tokens", "first_page", "num_pages"),
    [
        (1, 0, 0, 1),
        (PAGE_SIZE, 0, 0, 1),
        (PAGE_SIZE + 1, 0, 0, 2),
        (300, PAGE_SIZE - 1, 0, 5),
        (300, PAGE_SIZE, 1, 4),
        (300, 299, 4, 1),
        (300, 300, 4, 0),
        (256, 256, 4, 0),
    ],
)
def test_pages_are_wanted_from_the_first_that_is_not_complete(
    num_tokens: int, prefix_tokens: int, first_page: int, num_pages: int
) -> None:
    request = ask(list(range(num_pages)), num_tokens, prefix_tokens)
    assert (request.first_page["kv"], request.num_pages["kv"]) == (first_page, num_pages)
    for wrong in (num_pages + 1, num_pages - 1):
        if wrong >= 0:
            with pytest.raises(InvalidInput, match=f"need {num_pages} pages of 64 tokens, {wrong} were given"):
                ask(list(range(wrong)), num_tokens, prefix_tokens)


@pytest.mark.parametrize(("num_tokens", "prefix_tokens"), [(0, 0), (-1, 0), (10, 11), (10, -1)])
def test_a_token_range_that_is_none_is_refused(num_tokens: int, prefix_tokens: int) -> None:
    with pytest.raises(InvalidInput, match="asks for tokens"):
        ask([1], num_tokens, prefix_tokens)


@pytest.mark.parametrize(("pages", "text"), [([1, 1], "twice"), ([1, 16], "16 pages"), ([-1, 2], "-1..2")])
def test_destination_pages_must_be_distinct_and_in_the_pool(pages: list[int], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        ask(pages, 2 * PAGE_SIZE)


def test_page_groups_must_be_those_of_the_layout() -> None:
    with pytest.raises(InvalidInput, match=r"\['state'\]; the layout has \['kv'\]"):
        build_request(LAYOUT, "t", {"state": [1]}, 10, readers=ReaderSet("dec"))


@pytest.mark.parametrize("transfer_id", ["", "x" * 257])
def test_an_id_that_no_frame_can_carry_is_refused(transfer_id: str) -> None:
    with pytest.raises(InvalidInput, match="1 to 256 bytes"):
        ask([1], 10, 0, transfer_id)


def test_the_engine_may_reuse_its_list_after_the_call() -> None:
    pages = [3, 4]
    request = ask(pages, 2 * PAGE_SIZE)
    pages[0] = 9
    assert request.pages["kv"].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("num_tokens", "prefix_tokens", "first_page", "num_positions", "num_pages"),
    [
        (1, 0, 0, 1, 1),
        (3 * PAGE_SIZE, 0, 0, 3, 1),
        (3 * PAGE_SIZE + 1, 0, 0, 4, 2),
        (7 * PAGE_SIZE, 3 * PAGE_SIZE - 1, 0, 7, 3),
        (7 * PAGE_SIZE, 3 * PAGE_SIZE, 3, 4, 2),
        (7 * PAGE_SIZE, 7 * PAGE_SIZE, 6, 0, 0),
    ],
)
def test_where_ranks_share_tokens_a_page_is_that_of_as_many_positions(
    num_tokens, prefix_tokens, first_page, num_positions, num_pages
):
    """Three ranks: the pages given are those of the first page that is not complete, and on."""
    pages = list(range(num_pages))
    made = build_request(
        LAYOUT, "t", {"kv": pages}, num_tokens, prefix_tokens=prefix_tokens, readers=ReaderSet("dec"), turns=3
    )
    assert (made.first_page["kv"], made.num_pages["kv"]) == (first_page, num_positions)
    stop = first_page + num_positions
    assert made.targets("kv", first_page, stop).tolist() == [pages[at // 3] for at in range(num_positions)]
    with pytest.raises(InvalidInput, match=f"need {num_pages} pages of 192 tokens"):
        build_request(
            LAYOUT, "t", {"kv": [*pages, 9]}, num_tokens, prefix_tokens=prefix_tokens, readers=ReaderSet("dec"), turns=3
        )
