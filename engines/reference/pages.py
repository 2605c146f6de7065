"""Owns which pages are free, who uses them, and which full pages hold a prefix that another prompt may share.

It holds no bytes and never touches the pool. Decisions depend on the order of calls alone, so that all ranks of a
shard group that make the same calls hand out the same pages.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from pdlink.errors import InvalidInput, StateError


class PageTable:
    """Pages of `page_size` tokens. A page is free, in use (counted), or kept: unused, but its prefix is remembered.

    `page_order` lists the usable page ids in the order in which they are first handed out. Kept pages are given up,
    the longest unused first, when nothing else is free.
    """

    def __init__(self, page_order: Iterable[int], page_size: int) -> None:
        order = tuple(page_order)
        if len(set(order)) != len(order):
            raise InvalidInput("page_order names a page twice")
        self.page_size = page_size
        self.num_pages = len(order)
        self._free = deque(order)
        self._users: dict[int, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free) + len(self._kept)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """Take `count` pages, or none at all when there are too few. Their old prefixes are forgotten."""
        if count > self.num_available:
            return None
        pages = tuple(self._take_one() for _ in range(count))
        self._users.update((page, 1) for page in pages)
        return pages

    def share(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Take the pages that already hold the longest full-page prefix of `tokens`, in order.

        The last token is never covered: its forward gives the first token of the answer.
        """
        shared = []
        for key in islice(self._keys(tokens), (len(tokens) - 1) // self.page_size):
            page = self._page_of.get(key)
            if page is None:
                break
            shared.append(page)
        for page in shared:
            self._kept.pop(page, None)
            self._users[page] = self._users.get(page, 0) + 1
        return tuple(shared)

    def remember(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Let other prompts share `pages`, which are final and hold the full-page prefix of `tokens`."""
        for page, key in zip(pages, self._keys(tokens), strict=False):
            if key not in self._page_of and page not in self._key_of:
                self._page_of[key] = page
                self._key_of[page] = key

    def release(self, pages: Iterable[int]) -> None:
        """Give up one use of each page. Raises `StateError` for a page that is not in use."""
        for page in pages:
            users = self._users.get(page, 0)
            if not users:
                raise StateError(f"page {page} is released, but nobody uses it")
            if users > 1:
                self._users[page] = users - 1
                continue
            del self._users[page]
            if page in self._key_of:
                self._kept[page] = None
            else:
                self._free.append(page)

    def _take_one(self) -> int:
        if self._free:
            return self._free.popleft()
        page, _ = self._kept.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page

    def _keys(self, tokens: Sequence[int]) -> Iterator[bytes]:
        """A key for each full page of `tokens`, which stands for the page and all before it."""
        key = b""
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            text = ",".join(map(str, tokens[start : start + self.page_size]))
            key = hashlib.blake2b(key + text.encode(), digest_size=16).digest()
            yield key
