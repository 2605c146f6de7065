"""Owns what a model caches per token, as numbers, and the cache layout that follows. It loads no model and no torch."""

from __future__ import annotations

from dataclasses import dataclass

from pdlink.errors import InvalidInput
from pdlink.layout.components import CacheLayout, Component, heads, index_k, latent
from pdlink.layout.layer_plan import balanced_ranges

DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The cached values of one token in one layer: either a latent row, or `kv_heads` keys and values.

    `latent_dims` counts the compressed row and the rotary part behind it. `index_layers` are the layers that run an
    indexer of their own and cache `index_dims` values of indexer key; a layer that shares another's choice caches none.
    """

    num_layers: int
    dtype: str
    latent_dims: int = 0
    kv_heads: int = 0
    head_dims: int = 0
    index_dims: int = 0
    index_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise InvalidInput(f"dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        if (self.latent_dims > 0) == (self.kv_heads > 0):
            raise InvalidInput(
                f"a cache shape has either latent_dims or kv_heads, got {self.latent_dims} and {self.kv_heads}"
            )
        if self.index_layers and self.index_dims < 1:
            raise InvalidInput(f"index_layers {self.index_layers} need index_dims of at least 1, got {self.index_dims}")

    @property
    def value_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes over all layers and components."""
        row = self.latent_dims or 2 * self.kv_heads * self.head_dims
        return (row * self.num_layers + self.index_dims * len(self.index_layers)) * self.value_bytes

    def layout(self, page_size: int, kept_heads: range | None = None) -> CacheLayout:
        """The components of this model in pages of `page_size` tokens, with those of the KV heads that a rank keeps.

        A latent row and an indexer key have no heads, so that every tensor-parallel rank keeps them whole. Raises
        `InvalidInput`.
        """
        if page_size < 1:
            raise InvalidInput(f"page size {page_size} must be at least 1 token")
        kept = range(self.kv_heads) if kept_heads is None else kept_heads
        layers = range(self.num_layers)
        components: list[Component]
        if self.latent_dims:
            row = self.latent_dims * self.value_bytes
            components = [latent(page_size, layers, bytes_per_token=row, dtype=self.dtype)]
        else:
            head = self.head_dims * self.value_bytes
            components = [
                heads(
                    name,
                    page_size,
                    layers,
                    num_heads=len(kept),
                    head_bytes=head,
                    dtype=self.dtype,
                    total_heads=self.kv_heads,
                )
                for name in ("k", "v")
            ]
        if self.index_layers:
            key = self.index_dims * self.value_bytes
            components.append(index_k(page_size, self.index_layers, key_bytes=key, scale_bytes=0, dtype=self.dtype))
        return CacheLayout(self.num_layers, tuple(components))


def head_range(num_heads: int, num_ranks: int, rank: int) -> range:
    """The heads of one rank: contiguous, the first ranks one more. Raises `InvalidInput` for a rank without any."""
    if num_ranks > num_heads:
        raise InvalidInput(f"tp {num_ranks} is more than the {num_heads} heads that can be split; give at most that")
    return balanced_ranges(num_heads, num_ranks)[rank]
