"""Owns what a cached token looks like in memory: fields, components, page groups and the cache layout.

It holds no addresses (see `regions`) and does not say who has which layer (see `layer_plan`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pdlink.errors import LayoutError

DRAFT_PREFIX = "draft."
MAX_PAGE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Field:
    """One run of bytes per token inside a page.

    Token t of head h starts at `offset + t * token_stride + h * head_stride` and is `bytes_per_token` long, which
    counts one head. `head_stride` is 0 where there is one head. All figures are bytes.
    """

    name: str
    offset: int
    bytes_per_token: int
    token_stride: int
    num_heads: int = 1
    head_stride: int = 0

    def __post_init__(self) -> None:
        if self.bytes_per_token < 1 or self.num_heads < 1:
            raise LayoutError(
                f"field {self.name!r} needs bytes_per_token and num_heads of at least 1, got "
                f"{self.bytes_per_token} and {self.num_heads}"
            )
        if self.offset < 0 or self.token_stride < 0 or self.head_stride < 0:
            raise LayoutError(f"field {self.name!r} has a negative offset or stride")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all heads."""
        return self.bytes_per_token * self.num_heads

    def end(self, page_size: int) -> int:
        """First byte past the last token and head of a page."""
        last = (page_size - 1) * self.token_stride + (self.num_heads - 1) * self.head_stride
        return self.offset + last + self.bytes_per_token

    def starts(self, page_size: int) -> np.ndarray:
        """int64 [page_size, num_heads]: where each token and head starts in the page."""
        tokens = np.arange(page_size, dtype=np.int64)[:, None] * self.token_stride
        heads = np.arange(self.num_heads, dtype=np.int64)[None, :] * self.head_stride
        return self.offset + tokens + heads


@dataclass(frozen=True, slots=True)
class Component:
    """One kind of cached tensor, the same in every layer that has it.

    `layers` are global layer ids, strictly increasing; a component of the draft model has the prefix `draft.` and
    counts its layers from 0 in a namespace of its own. `page_size` is in tokens and `page_bytes` in bytes. `fields`
    lie inside the page and do not overlap; bytes that no field covers are padding and travel with the page.
    `page_group` names the page list that addresses this component. `total_heads` is how many heads the model has, of
    which a rank's pages hold as many as its fields say; 0 where nothing is split by heads. Raises `LayoutError`.
    """

    name: str
    dtype: str
    page_size: int
    page_bytes: int
    layers: tuple[int, ...]
    fields: tuple[Field, ...]
    page_group: str = "kv"
    total_heads: int = 0

    def __post_init__(self) -> None:
        if not self.name or not self.page_group:
            raise LayoutError(f"component {self.name!r} needs a name and a page group")
        if self.page_size < 1 or not 1 <= self.page_bytes <= MAX_PAGE_BYTES:
            raise LayoutError(
                f"component {self.name!r} has page_size={self.page_size} tokens and page_bytes={self.page_bytes}; "
                f"both must be positive and a page at most {MAX_PAGE_BYTES} bytes"
            )
        if any(one < 0 for one in self.layers) or any(
            b <= a for a, b in zip(self.layers, self.layers[1:], strict=False)
        ):
            raise LayoutError(f"component {self.name!r} needs strictly increasing layer ids, got {self.layers}")
        if not self.fields:
            raise LayoutError(f"component {self.name!r} has no fields")
        self._check_fields()
        self._check_heads()

    def _check_fields(self) -> None:
        if len({field.name for field in self.fields}) != len(self.fields):
            raise LayoutError(f"component {self.name!r} names a field twice")
        # Plain integers first: they bound what the arrays below may cost, and cannot wrap.
        for field in self.fields:
            end = field.end(self.page_size)
            if end > self.page_bytes:
                raise LayoutError(
                    f"field {field.name!r} of component {self.name!r} ends at byte {end}, past the page of "
                    f"{self.page_bytes} bytes"
                )
        if self.page_size * sum(field.token_bytes for field in self.fields) > self.page_bytes:
            raise LayoutError(f"fields of component {self.name!r} overlap inside the page")
        spans = []
        for field in self.fields:
            starts = field.starts(self.page_size).reshape(-1)
            spans.append(np.stack([starts, starts + field.bytes_per_token], axis=1))
        every = np.concatenate(spans)
        every = every[np.argsort(every[:, 0], kind="stable")]
        if bool(np.any(every[1:, 0] < every[:-1, 1])):
            raise LayoutError(f"fields of component {self.name!r} overlap inside the page")

    def _check_heads(self) -> None:
        if not self.total_heads:
            return
        counts = [field.num_heads for field in self.fields]
        if len(set(counts)) > 1 or self.total_heads < counts[0]:
            raise LayoutError(
                f"component {self.name!r} has fields of {counts} heads; with total_heads={self.total_heads} all must "
                "have the same number, at most that"
            )

    @property
    def num_heads(self) -> int:
        """Heads in a page: those of the field that has most."""
        return max(field.num_heads for field in self.fields)

    @property
    def model_heads(self) -> int:
        """Heads that the model has: those of a page where it does not say."""
        return self.total_heads or self.num_heads

    @property
    def is_by_heads(self) -> bool:
        """Whether it is made of heads, alike in all fields: then a side may hold some of them only."""
        return self.model_heads > 1 and len({field.num_heads for field in self.fields}) == 1

    @property
    def is_draft(self) -> bool:
        return self.name.startswith(DRAFT_PREFIX)

    def field(self, name: str) -> Field:
        for one in self.fields:
            if one.name == name:
                return one
        known = ", ".join(one.name for one in self.fields)
        raise LayoutError(f"component {self.name!r} has no field {name!r}; it has {known}")


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Components that share page size and page ids: a request has one page list for each group."""

    name: str
    page_size: int
    components: tuple[str, ...]

    def num_pages(self, num_tokens: int) -> int:
        """Pages that hold tokens [0, num_tokens)."""
        return -(-num_tokens // self.page_size)


@dataclass(frozen=True)
class CacheLayout:
    """Everything a model caches: its components, of `num_layers` model layers (and `num_draft_layers`).

    Component names are unique; components of one page group agree on the page size; layer ids are below the number
    of layers of their namespace; some component of the model itself has a layer. Raises `LayoutError`.
    """

    num_layers: int
    components: tuple[Component, ...]
    num_draft_layers: int = 0

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.num_draft_layers < 0:
            raise LayoutError(
                f"a cache layout needs at least one layer, got num_layers={self.num_layers} and "
                f"num_draft_layers={self.num_draft_layers}"
            )
        if not any(one.layers for one in self.components if not one.is_draft):
            raise LayoutError("a cache layout needs at least one component of the model that has a layer")
        if len({one.name for one in self.components}) != len(self.components):
            raise LayoutError(f"component names repeat: {[one.name for one in self.components]}")
        sizes: dict[str, int] = {}
        for one in self.components:
            limit = self.layers_of(one.name)
            if one.layers and one.layers[-1] >= limit:
                raise LayoutError(f"component {one.name!r} has layer {one.layers[-1]} of only {limit} layers")
            if sizes.setdefault(one.page_group, one.page_size) != one.page_size:
                raise LayoutError(
                    f"component {one.name!r} has page_size={one.page_size} in page group {one.page_group!r} of "
                    f"page_size={sizes[one.page_group]}; components that differ need groups of their own"
                )

    @cached_property
    def _by_name(self) -> dict[str, Component]:
        return {one.name: one for one in self.components}

    def component(self, name: str) -> Component:
        try:
            return self._by_name[name]
        except KeyError:
            raise LayoutError(f"no component {name!r}; the layout has {', '.join(self._by_name)}") from None

    def layers_of(self, component: str) -> int:
        """Number of layers in the namespace (model or draft) of `component`."""
        return self.num_draft_layers if component.startswith(DRAFT_PREFIX) else self.num_layers

    @cached_property
    def page_groups(self) -> tuple[PageGroup, ...]:
        """In order of first appearance."""
        names: dict[str, list[Component]] = {}
        for one in self.components:
            names.setdefault(one.page_group, []).append(one)
        return tuple(
            PageGroup(name, members[0].page_size, tuple(one.name for one in members)) for name, members in names.items()
        )

    def page_group(self, name: str) -> PageGroup:
        for one in self.page_groups:
            if one.name == name:
                return one
        known = ", ".join(one.name for one in self.page_groups)
        raise LayoutError(f"no page group {name!r}; the layout has {known}")

    def cells(self) -> Iterator[tuple[str, int]]:
        """Every (component, global layer id)."""
        for one in self.components:
            for layer in one.layers:
                yield one.name, layer


def token_rows(name: str, nbytes: int) -> Field:
    """A field whose tokens follow each other without a gap, alone in its page."""
    return Field(name, 0, nbytes, nbytes)


def latent(page_size: int, layers: Iterable[int], *, bytes_per_token: int, dtype: str = "bfloat16") -> Component:
    """MLA latent KV: one row of `bytes_per_token` a token (576 bf16 values are 1,152 B; packed fp8 is 656 B)."""
    rows = (token_rows("latent", bytes_per_token),)
    return Component("latent", dtype, page_size, page_size * bytes_per_token, tuple(layers), rows)


def index_k(
    page_size: int,
    layers: Iterable[int],
    *,
    key_bytes: int = 128,
    scale_bytes: int = 4,
    dtype: str = "float8_e4m3fn",
) -> Component:
    """DSA indexer keys in a page-shaped buffer: all keys of the page, then all scales (sglang and vLLM alike)."""
    fields = [Field("key", 0, key_bytes, key_bytes)]
    if scale_bytes:
        fields.append(Field("scale", page_size * key_bytes, scale_bytes, scale_bytes))
    nbytes = page_size * (key_bytes + scale_bytes)
    return Component("index_k", dtype, page_size, nbytes, tuple(layers), tuple(fields))


def heads(
    name: str,
    page_size: int,
    layers: Iterable[int],
    *,
    num_heads: int,
    head_bytes: int,
    dtype: str,
    total_heads: int = 0,
) -> Component:
    """GQA or MHA `k` or `v`: tokens outermost, then heads. `num_heads` are those of one rank, `total_heads` those of
    the model, which tensor-parallel ranks must say."""
    row = num_heads * head_bytes
    fields = (Field(name, 0, head_bytes, row, num_heads, head_bytes if num_heads > 1 else 0),)
    return Component(name, dtype, page_size, page_size * row, tuple(layers), fields, total_heads=total_heads)
