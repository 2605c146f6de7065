"""Owns what one forward reads: spans of prefix tokens, and the live pages that they make. Pure numpy, no pool.

A row is one token's place in a page. Rows of the prefix are fetched from a layer's owner; rows of the current chunk
never are, because the rank that computes them writes them itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pdlink.errors import LayoutError
from pdlink.layout import CacheLayout, PageGroup

DEFAULT_GROUP = "kv"
LayerKey = tuple[str, int]
"""(component name, global layer id)."""


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """Prefix tokens [0, num_tokens) of one request lie in `pages`, in order, of one page group.

    Pages past the prefix may be listed too (a request's whole page table); they are not read. An empty `page_group`
    means the layout's only group, or "kv" where there are several. Raises `LayoutError` for a negative token count.
    """

    pages: Sequence[int]
    num_tokens: int
    page_group: str = ""

    def __post_init__(self) -> None:
        if self.num_tokens < 0:
            raise LayoutError(f"a read span of num_tokens={self.num_tokens} makes no sense; give 0 for no prefix")


@dataclass(frozen=True)
class LivePages:
    """The pages of one page group that hold rows to fetch.

    `page_ids` is int64 [n] without repeats: first the `num_full` pages of which every row is wanted, then those of
    which some are, each part ascending. `rows` is bool [n, page_size] and says which rows.
    """

    page_ids: np.ndarray
    rows: np.ndarray
    num_full: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_full", int(self.rows.all(axis=1).sum()))

    @classmethod
    def of(cls, page_ids: np.ndarray, rows: np.ndarray) -> LivePages:
        """From distinct pages and their rows, in any order."""
        order = np.lexsort((page_ids, ~rows.all(axis=1)))
        return cls(np.ascontiguousarray(page_ids[order]), np.ascontiguousarray(rows[order]))

    @classmethod
    def none(cls, page_size: int) -> LivePages:
        return cls(np.empty(0, np.int64), np.empty((0, page_size), np.bool_))

    @property
    def num_pages(self) -> int:
        return len(self.page_ids)

    @property
    def page_size(self) -> int:
        return int(self.rows.shape[1])

    @cached_property
    def digest(self) -> int:
        """63 bits over page ids and rows."""
        return digest63(self.page_ids.tobytes(), np.packbits(self.rows).tobytes())

    def partial_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 [m] and int64 [m]: positions in `page_ids`, and rows, of every wanted row of a partial page."""
        position, row = np.nonzero(self.rows[self.num_full :])
        return position.astype(np.int64) + self.num_full, row.astype(np.int64)

    def contains(self, slots: np.ndarray) -> np.ndarray:
        """bool [len(slots)]: which of the slots (page * page_size + row) are among the rows."""
        if not self.num_pages:
            return np.zeros(len(slots), np.bool_)
        order = np.argsort(self.page_ids)
        pages, row = np.divmod(slots, self.page_size)
        at = np.minimum(np.searchsorted(self.page_ids, pages, sorter=order), self.num_pages - 1)
        found = order[at]
        return np.asarray((self.page_ids[found] == pages) & self.rows[found, row])

    def adding(self, slots: np.ndarray) -> LivePages:
        """These rows and those of `slots`."""
        if not len(slots):
            return self
        pages, row = np.divmod(slots, self.page_size)
        page_ids = np.union1d(self.page_ids, pages)
        rows = np.zeros((len(page_ids), self.page_size), np.bool_)
        rows[np.searchsorted(page_ids, self.page_ids)] = self.rows
        rows[np.searchsorted(page_ids, pages), row] = True
        return LivePages.of(page_ids, rows)


def live_pages(layout: CacheLayout, spans: Sequence[ReadSpan], num_pages: int) -> dict[str, LivePages]:
    """Page group -> live pages of `spans`, for every group of `layout`; spans that share a page are united.

    Raises `LayoutError` for an unknown group, a page outside [0, num_pages), a page listed twice in one span, or a
    span with fewer pages than its tokens need.
    """
    by_group: dict[str, list[ReadSpan]] = {group.name: [] for group in layout.page_groups}
    for span in spans:
        by_group[_group_of(layout, span).name].append(span)
    return {group.name: _unite(group, by_group[group.name], num_pages) for group in layout.page_groups}


def digest63(*parts: bytes) -> int:
    """A non-negative int64 that stands for `parts`."""
    hasher = hashlib.blake2b(digest_size=8)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return int.from_bytes(hasher.digest(), "little") >> 1


def _group_of(layout: CacheLayout, span: ReadSpan) -> PageGroup:
    if span.page_group:
        return layout.page_group(span.page_group)
    if len(layout.page_groups) == 1:
        return layout.page_groups[0]
    try:
        return layout.page_group(DEFAULT_GROUP)
    except LayoutError:
        known = ", ".join(group.name for group in layout.page_groups)
        raise LayoutError(f"a read span must name its page group, one of {known}") from None


def _unite(group: PageGroup, spans: Sequence[ReadSpan], num_pages: int) -> LivePages:
    used, rows_of = [], []
    for span in spans:
        pages = np.asarray(span.pages, dtype=np.int64).reshape(-1)
        needed = group.num_pages(span.num_tokens)
        if len(pages) < needed:
            raise LayoutError(
                f"a read span of {span.num_tokens} tokens needs {needed} pages of {group.page_size} tokens in page "
                f"group {group.name!r}, got {len(pages)}"
            )
        pages = pages[:needed]
        check_pages(pages, num_pages)
        if len(np.unique(pages)) != needed:
            raise LayoutError(f"a read span lists a page twice: {pages.tolist()[:16]}")
        counts = np.full(needed, group.page_size, np.int64)
        if needed:
            counts[-1] = span.num_tokens - (needed - 1) * group.page_size
        used.append(pages)
        rows_of.append(counts)
    if not used:
        return LivePages.none(group.page_size)
    page_ids, at = np.unique(np.concatenate(used), return_inverse=True)
    counts = np.zeros(len(page_ids), np.int64)
    np.maximum.at(counts, at, np.concatenate(rows_of))
    return LivePages.of(page_ids, np.arange(group.page_size)[None, :] < counts[:, None])


def check_pages(pages: np.ndarray, num_pages: int) -> None:
    """Raise `LayoutError` unless every page id is in [0, num_pages)."""
    strange = pages[(pages < 0) | (pages >= num_pages)]
    if len(strange):
        raise LayoutError(f"page {int(strange[0])} is outside the pool of num_pages={num_pages}")
