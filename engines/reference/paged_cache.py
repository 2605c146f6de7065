"""Owns the cache that a transformers model writes to and reads from during one forward; its rows live in a paged pool.

It computes nothing and decides nothing: new rows are gathered from all ranks, written to the pool by every rank (which
keeps them where it owns the layer), and the rows of all tokens so far are read back, prefix and chunk alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache

from pdlink_engines.reference.gather import RowGather
from pdlink_engines.reference.pool import PagedPool
from pdlink_engines.reference.shapes import CacheShape


def slots_of(pages: Sequence[int], page_size: int, start: int, end: int) -> torch.Tensor:
    """int64 [end - start]: page * page_size + offset of the tokens [start, end) of a request that has `pages`."""
    positions = torch.arange(start, end, dtype=torch.int64)
    ids = torch.tensor(pages, dtype=torch.int64)
    return ids[positions // page_size] * page_size + positions % page_size


def causal_mask(positions: Sequence[int], num_keys: int) -> torch.Tensor:
    """bool [1, 1, queries, num_keys]: which of the keys 0, 1, ... a query at each of `positions` may look at."""
    queries = torch.tensor(positions, dtype=torch.int64)
    return (torch.arange(num_keys)[None, :] <= queries[:, None])[None, None]


class PagedCache(Cache):
    """The cache of one request in one forward over the tokens [prefix, prefix + chunk).

    `all_slots` are the slots of tokens [0, prefix + chunk); `prefix` of them are in the pool already. `gather` turns
    this rank's rows into the chunk's. The caller brackets the forward with the pool's `begin_forward` and
    `end_forward`.
    """

    def __init__(
        self, pool: PagedPool, shape: CacheShape, *, all_slots: torch.Tensor, prefix: int, gather: RowGather
    ) -> None:
        super().__init__(layers=[])
        self._pool = pool
        self._latent = bool(shape.latent_dims)
        self._all_slots = all_slots
        self._prefix = prefix
        self._gather = gather

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [1, heads, rows, dims] of this rank in; those of all tokens so far out."""
        rows = [_heads_to_rows(key_states), _heads_to_rows(value_states)]
        if self._latent:
            dims = [one.shape[1] for one in rows]
            (full,) = self._exchange(layer_idx, [("latent", "latent", torch.cat(rows, dim=1))])
            keys, values = torch.split(full, dims, dim=1)
        else:
            keys, values = self._exchange(layer_idx, [("k", "k", rows[0]), ("v", "v", rows[1])])
        return _rows_to_heads(keys, key_states.shape[1]), _rows_to_heads(values, value_states.shape[1])

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Indexer keys [1, rows, dims] of this rank in; those of all tokens so far out."""
        (keys,) = self._exchange(layer_idx, [("index_k", "key", indexer_key_states[0])])
        return keys[None]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._prefix

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._prefix

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return len(self._all_slots), 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def _exchange(self, layer: int, columns: list[tuple[str, str, torch.Tensor]]) -> list[torch.Tensor]:
        """Pass (component, field, rows [n, values]) through the pool: one gather, then each component on its own."""
        parts = [_to_bytes(rows) for _, _, rows in columns]
        gathered = self._gather(torch.cat(parts, dim=1))
        chunk = torch.split(gathered, [one.shape[1] for one in parts], dim=1)
        full = []
        for (component, field, rows), fresh in zip(columns, chunk, strict=True):
            self._pool.read(component, layer)
            self._pool.write(component, layer, self._all_slots[self._prefix :], {field: fresh.contiguous()})
            stored = self._pool.rows(component, layer, field, self._all_slots)
            full.append(stored.contiguous().view(rows.dtype))
        return full


def _heads_to_rows(states: torch.Tensor) -> torch.Tensor:
    """[1, heads, rows, dims] -> [rows, heads * dims]"""
    return states[0].transpose(0, 1).flatten(1)


def _rows_to_heads(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[rows, heads * dims] -> [1, heads, rows, dims]"""
    return rows.reshape(len(rows), num_heads, -1).transpose(0, 1)[None]


def _to_bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(torch.uint8)
