"""Owns what published models cache, as numbers with their source, and the cache layouts that follow. It loads none."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from pdlink.errors import LayoutError
from pdlink.layout.components import CacheLayout, heads, index_k, latent

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}
PACKED_FP8 = "float8_e4m3fn"
LATENT_RANK = 512
ROPE_DIMS = 64
LATENT_BYTES = {
    "bfloat16": 2 * (LATENT_RANK + ROPE_DIMS),
    "float16": 2 * (LATENT_RANK + ROPE_DIMS),
    # FlashMLA's row, in sglang and vLLM alike: 512 fp8 values, 4 fp32 scales, 64 rotary values in bf16.
    PACKED_FP8: LATENT_RANK + 4 * 4 + 2 * ROPE_DIMS,
}


@dataclass(frozen=True, slots=True)
class MlaModel:
    """A model with MLA latent rows (512 + 64 values) and DSA indexer keys (128 fp8 values and one fp32 scale).

    `index_layers` are those that run an indexer of their own; the others use the choice of an earlier one.
    `source` says where the figures come from.
    """

    name: str
    title: str
    num_layers: int
    index_layers: tuple[int, ...]
    source: str

    @property
    def shares_indexers(self) -> bool:
        return len(self.index_layers) < self.num_layers

    def layout(self, page_size: int, dtype: str = "bfloat16") -> CacheLayout:
        """Indexer keys on every layer, as an engine allocates that does not know of sharing. Raises `LayoutError`."""
        return self._layout(page_size, dtype, range(self.num_layers))

    def own_layout(self, page_size: int, dtype: str = "bfloat16") -> CacheLayout:
        """Indexer keys only on layers that run an indexer. Raises `LayoutError`."""
        return self._layout(page_size, dtype, self.index_layers)

    def _layout(self, page_size: int, dtype: str, index_layers: Iterable[int]) -> CacheLayout:
        if dtype not in LATENT_BYTES:
            raise LayoutError(f"dtype {dtype!r} is not one that {self.name} caches; give {', '.join(LATENT_BYTES)}")
        check_page_size(page_size)
        rows = latent(page_size, range(self.num_layers), bytes_per_token=LATENT_BYTES[dtype], dtype=dtype)
        return CacheLayout(self.num_layers, (rows, index_k(page_size, index_layers)))


def _full_indexers(num_layers: int, period: int, offset: int) -> tuple[int, ...]:
    """Layers that run an indexer: the first `offset`, then every `period`-th after the last of them."""
    return tuple(layer for layer in range(num_layers) if max(layer - offset + 1, 0) % period == 0)


MODELS = {
    one.name: one
    for one in (
        MlaModel(
            "glm-5.2",
            "GLM-5.2",
            78,
            _full_indexers(78, period=4, offset=3),
            "zai-org/GLM-5.2 config.json (index_topk_freq 4, index_skip_topk_offset 3), read as transformers 5.24 does",
        ),
        MlaModel("deepseek-v3.2", "DeepSeek V3.2", 61, tuple(range(61)), "deepseek-ai/DeepSeek-V3.2-Exp config.json"),
    )
}


def describe_layout(
    num_layers: int,
    page_size: int,
    *,
    latent_bytes: int = 0,
    index_bytes: int = 0,
    kv_heads: int = 0,
    head_dims: int = 0,
    total_heads: int = 0,
    dtype: str = "bfloat16",
) -> CacheLayout:
    """The layout of a model given by numbers, the same in every layer.

    Either `latent_bytes` a token, with `index_bytes` a token of indexer keys where there are any (the last 4 of them
    the scale), or `kv_heads` heads of `head_dims` values on this rank, of the model's `total_heads` (default: all of
    them are here). Raises `LayoutError` for anything else.
    """
    if num_layers < 1:
        raise LayoutError(f"num_layers={num_layers} must be at least 1")
    check_page_size(page_size)
    if dtype not in DTYPE_BYTES:
        raise LayoutError(f"dtype {dtype!r} is unknown{nearest(dtype, DTYPE_BYTES)}")
    if (latent_bytes > 0) == (kv_heads > 0):
        raise LayoutError(
            f"a layout has either latent bytes or KV heads, got latent_bytes={latent_bytes} and kv_heads={kv_heads}"
        )
    layers = range(num_layers)
    if kv_heads:
        if head_dims < 1 or index_bytes:
            raise LayoutError(
                f"kv_heads={kv_heads} needs head_dims of at least 1 and no index_bytes, got {head_dims}, {index_bytes}"
            )
        head = head_dims * DTYPE_BYTES[dtype]
        return CacheLayout(
            num_layers,
            tuple(
                heads(
                    name,
                    page_size,
                    layers,
                    num_heads=kv_heads,
                    head_bytes=head,
                    dtype=dtype,
                    total_heads=total_heads or kv_heads,
                )
                for name in ("k", "v")
            ),
        )
    components = [latent(page_size, layers, bytes_per_token=latent_bytes, dtype=dtype)]
    if index_bytes:
        if index_bytes < 5:
            raise LayoutError(f"index_bytes={index_bytes} must hold a key and its scale of 4 bytes; give 5 or more")
        components.append(index_k(page_size, layers, key_bytes=index_bytes - 4))
    return CacheLayout(num_layers, tuple(components))


def check_page_size(page_size: int) -> None:
    if page_size < 1:
        raise LayoutError(f"page_size={page_size} must be at least 1 token")


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` where a known name is near, else the list of them all."""
    known = list(known)
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; known ones: {', '.join(known)}"
