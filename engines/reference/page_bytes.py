"""Owns the bytes of a request's pages, as digests fit to compare across processes, and where two sets differ."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from pdlink.layout.components import Component
from pdlink.layout.layer_plan import OwnedLayers
from pdlink_engines.reference.pool import PagedPool

Cell = tuple[str, int]
"""Component name and global layer id."""

PageDigests = dict[Cell, tuple[str, ...]]
"""For each cell, a digest per page of the request, in the order of its tokens."""


def digest_pages(
    pool: PagedPool, page_ids: Sequence[int], num_tokens: int, owned: OwnedLayers | None = None
) -> PageDigests:
    """A digest of each page of `collect_pages`."""
    return {cell: _digests(rows) for cell, rows in collect_pages(pool, page_ids, num_tokens, owned).items()}


def collect_pages(
    pool: PagedPool, page_ids: Sequence[int], num_tokens: int, owned: OwnedLayers | None = None
) -> dict[Cell, torch.Tensor]:
    """uint8 [len(page_ids), page_bytes] for each cell of `owned` (default: the whole layout), a copy.

    Bytes of tokens from `num_tokens` on are zero in it: they belong to nobody, or to tokens that decode added.
    """
    pages = torch.tensor(page_ids, dtype=torch.int64)
    found: dict[Cell, torch.Tensor] = {}
    for component in pool.layout.components:
        for layer in component.layers if owned is None else owned.get(component.name, ()):
            rows = pool.region_tensor(component.name, layer).index_select(0, pages)
            _zero_unused(rows, component, num_tokens)
            found[component.name, layer] = rows
    return found


def differing_pages(expected: Mapping[Cell, Sequence[str]], found: Mapping[Cell, Sequence[str]]) -> list[str]:
    """What differs between two requests' digests, a line each; a cell or page that one side lacks differs too."""
    lines = []
    for component, layer in sorted(expected.keys() | found.keys()):
        ours, theirs = expected.get((component, layer)), found.get((component, layer))
        if ours is None or theirs is None:
            lines.append(f"component {component} layer {layer} is on one side only")
            continue
        if len(ours) != len(theirs):
            lines.append(f"component {component} layer {layer} has {len(ours)} pages and {len(theirs)}")
        pairs = enumerate(zip(ours, theirs, strict=False))
        lines += [f"component {component} layer {layer} page {page} differs" for page, (a, b) in pairs if a != b]
    return lines


def _digests(rows: torch.Tensor) -> tuple[str, ...]:
    return tuple(hashlib.blake2b(row.numpy().tobytes(), digest_size=16).hexdigest() for row in rows)


def _zero_unused(rows: torch.Tensor, component: Component, num_tokens: int) -> None:
    """Zero, in place, the bytes of tokens at and after `num_tokens`."""
    full, tail = divmod(num_tokens, component.page_size)
    for page in range(full, len(rows)):
        first = tail if page == full else 0
        for field in component.fields:
            for start in field.starts(component.page_size)[first:].reshape(-1):
                rows[page, int(start) : int(start) + field.bytes_per_token] = 0
