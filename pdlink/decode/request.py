"""Owns what an engine asks for: one request's destination pages, checked. It knows no prefill rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pdlink.control.frames import PageSpan
from pdlink.errors import InvalidInput
from pdlink.layout.components import CacheLayout
from pdlink.layout.readers import ReaderSet
from pdlink.transfer.descriptors import Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class ReceiveRequest:
    """One request as decode asks for it.

    `pages` has, per page group, own pages: int64, distinct. The first is that of page position `first_page`; a page
    holds what belongs here of `turns` positions, and there are `num_pages` of these. `expect_aux` fails the transfer
    when the elected owner sends none.
    """

    transfer_id: str
    readers: ReaderSet
    pages: Mapping[str, Int64Array]
    first_page: Mapping[str, int]
    num_pages: Mapping[str, int]
    dp: int = 0
    expect_aux: bool = False
    turns: int = 1

    def spans(self) -> tuple[PageSpan, ...]:
        return tuple(PageSpan(group, self.first_page[group], self.num_pages[group]) for group in self.pages)

    def targets(self, group: str, start: int, stop: int) -> Int64Array:
        """int64 [stop - start]: the own page of each page position in [start, stop)."""
        pages, first = self.pages[group], self.first_page[group]
        if self.turns == 1:
            return pages[start - first : stop - first]
        return pages[(np.arange(start, stop, dtype=np.int64) - first) // self.turns]


def build_request(
    layout: CacheLayout,
    transfer_id: str,
    pages: Mapping[str, Sequence[int] | Int64Array],
    num_tokens: int,
    *,
    prefix_tokens: int = 0,
    readers: ReaderSet,
    dp: int = 0,
    expect_aux: bool = False,
    turns: int = 1,
    pool_pages: Mapping[str, int] | None = None,
) -> ReceiveRequest:
    """Check an engine's call and give every page its position.

    Tokens [0, prefix_tokens) are on decode already; pages are wanted from the first one that is not complete. Where
    decode ranks share the tokens, `turns` is how many do: a page is that of so many page positions. Raises
    `InvalidInput` naming the page group, how many pages the token range needs and how many were given: lists of two
    groups that were swapped are refused wherever their sizes differ.
    """
    if not transfer_id or len(transfer_id.encode()) > 256:
        raise InvalidInput(f"transfer id {transfer_id[:64]!r} must have 1 to 256 bytes")
    if num_tokens < 1 or not 0 <= prefix_tokens <= num_tokens:
        raise InvalidInput(
            f"transfer {transfer_id!r} asks for tokens [{prefix_tokens}, {num_tokens}); give a request of at least one "
            "token and a prefix inside it"
        )
    groups = {group.name: group for group in layout.page_groups}
    if set(pages) != set(groups):
        raise InvalidInput(
            f"transfer {transfer_id!r} gives pages for groups {sorted(pages)}; the layout has {sorted(groups)}"
        )
    checked: dict[str, Int64Array] = {}
    first: dict[str, int] = {}
    counts: dict[str, int] = {}
    for name, group in groups.items():
        ids = np.array(pages[name], dtype=np.int64).reshape(-1)
        size = group.page_size * turns
        start = prefix_tokens // size
        wanted = 0 if prefix_tokens == num_tokens else -(-num_tokens // size) - start
        if len(ids) != wanted:
            raise InvalidInput(
                f"transfer {transfer_id!r}, page group {name!r}: tokens [{prefix_tokens}, {num_tokens}) need {wanted} "
                f"pages of {size} tokens, {len(ids)} were given"
            )
        _check_ids(transfer_id, name, ids, (pool_pages or {}).get(name))
        checked[name], first[name] = ids, start * turns
        counts[name] = group.num_pages(num_tokens) - first[name] if wanted else 0
    return ReceiveRequest(transfer_id, readers, checked, first, counts, dp, expect_aux, turns)


def _check_ids(transfer_id: str, group: str, ids: Int64Array, limit: int | None) -> None:
    if not len(ids):
        return
    if len(np.unique(ids)) != len(ids):
        raise InvalidInput(f"transfer {transfer_id!r} gives a destination page of group {group!r} twice")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or (limit is not None and high >= limit):
        raise InvalidInput(
            f"transfer {transfer_id!r} gives destination pages {low}..{high} of group {group!r}; the pool has "
            f"{limit} pages"
        )
