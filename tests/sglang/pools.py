"""Owns sglang's real KV pools on CPU, over memory that other processes can map, and the bytes that tests put there."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

NUM_TOKENS = 512
PAGE_SIZE = 64
NUM_PAGES = NUM_TOKENS // PAGE_SIZE + 1
FILLER = 0xA5

Bytes = npt.NDArray[np.uint8]


def make_pool(num_layers: int, rank: int = 0, num_ranks: int = 1, shared_topk: tuple[int, ...] = ()) -> Any:
    """A DSA pool of `num_layers`; with several ranks sglang's layer-split one. Its buffers are shared memory.

    Layers `shared_topk` use the index keys of the layer before them and have none of their own.
    """
    import torch
    from sglang.srt.mem_cache.dsa_cache_layer_split import LayerSplitDSATokenToKVPool
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    from pdlink_engines.sglang.shared_pools import shared_pools

    arguments = {
        "page_size": PAGE_SIZE,
        "dtype": torch.bfloat16,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "layer_num": num_layers,
        "device": "cpu",
        "kv_cache_dim": 576,
        "enable_memory_saver": False,
        "start_layer": 0,
        "end_layer": num_layers,
        "index_head_dim": 128,
        "skip_topk_layers": [layer in shared_topk for layer in range(num_layers)],
    }
    with shared_pools():
        if num_ranks == 1:
            return DSATokenToKVPool(NUM_TOKENS, **arguments)
        return LayerSplitDSATokenToKVPool(NUM_TOKENS, layer_shard_rank=rank, layer_shard_size=num_ranks, **arguments)


def make_mla_pool(num_layers: int, page_size: int) -> Any:
    """A pool of MLA rows alone, whose page size is free."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    from pdlink_engines.sglang.shared_pools import shared_pools

    with shared_pools():
        return MLATokenToKVPool(
            NUM_TOKENS,
            page_size=page_size,
            dtype=torch.bfloat16,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            layer_num=num_layers,
            device="cpu",
            enable_memory_saver=False,
            start_layer=0,
            end_layer=num_layers,
        )


def layers_of(pool: Any) -> dict[tuple[str, int], Bytes]:
    """(component, layer) -> uint8 [pages, page bytes] over the pool's own memory, for every layer that it has."""
    found: dict[tuple[str, int], Bytes] = {}
    for layer in range(pool.layer_num):
        for name, tensor in (("latent", pool.kv_buffer[layer]), ("index_k", pool.index_k_with_scale_buffer[layer])):
            if tensor.shape[0]:
                rows = tensor.view(dtype=_uint8()).numpy()
                found[name, layer] = rows.reshape(NUM_PAGES if name == "latent" else rows.shape[0], -1)
    return found


def pattern(seed: int, name: str, layer: int, page_bytes: int) -> Bytes:
    """uint8 [pages, page_bytes]: what prefill's page p of that layer holds. Every layer and page differs."""
    source = np.random.default_rng([seed, layer, len(name)])
    return source.integers(0, 255, (NUM_PAGES, page_bytes), dtype=np.uint8)


def fill(pool: Any, seed: int) -> None:
    """Write the pattern into every page of every layer that the pool has."""
    for (name, layer), rows in layers_of(pool).items():
        rows[:NUM_PAGES] = pattern(seed, name, layer, rows.shape[1])


def blank(pool: Any) -> None:
    for rows in layers_of(pool).values():
        rows[:] = FILLER


def differences(pool: Any, seed: int, source: list[int], target: list[int]) -> list[str]:
    """Where the pool is not what a transfer of pages `source` into `target` leaves; empty when it is, to the byte.

    Other pages must be as `blank` left them.
    """
    wrong = []
    for (name, layer), rows in layers_of(pool).items():
        expected = np.full_like(rows, FILLER)
        expected[target] = pattern(seed, name, layer, rows.shape[1])[source]
        bad = np.flatnonzero((rows != expected).any(axis=1))
        if len(bad):
            wrong.append(f"{name} layer {layer}: pages {bad.tolist()}")
    return wrong


def _uint8() -> Any:
    import torch

    return torch.uint8
