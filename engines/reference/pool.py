"""Owns what this engine asks of a paged pool, as a protocol. The memory itself belongs to the pool passed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from pdlink.layout.components import CacheLayout
from pdlink.memory.forward import ReadSpan

if TYPE_CHECKING:
    import torch


class PagedPool(Protocol):
    """A pool of pages. Every call of a forward is made by all ranks of the shard group, in the same order.

    Within a layer of a forward: `read` (the prefix), then `write` (the chunk's rows, all of them on every rank), then
    `rows`. What `read` gave is valid until its buffer is reused, or `end_forward`; `rows` copies.
    """

    layout: CacheLayout
    num_pages: int

    def begin_forward(self, spans: Sequence[ReadSpan]) -> None:
        """Say which tokens [0, num_tokens) of which pages this forward reads, a span for each request."""

    def read(self, component: str, layer: int) -> torch.Tensor:
        """uint8 [num_pages, page_bytes], the rows of the spans valid."""

    def write(self, component: str, layer: int, slots: torch.Tensor, fields: Mapping[str, torch.Tensor]) -> None:
        """Store rows: `slots` int64 [n] are page * page_size + offset, each field uint8 [n, bytes of a token]."""

    def rows(self, component: str, layer: int, field: str, slots: torch.Tensor) -> torch.Tensor:
        """uint8 [n, bytes of a token], copied from where `slots` point."""

    def end_forward(self) -> None:
        """Finish the forward; raises when an integrity check failed."""

    def region_tensor(self, component: str, layer: int) -> torch.Tensor:
        """uint8 [num_pages, page_bytes] of a layer that this rank owns."""
