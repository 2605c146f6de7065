"""Owns rotary embedding on CPU, in place, as vLLM's kernel of that name does it."""

import torch


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    """Rotate the first `cos_sin_cache.shape[-1]` values of every head of `query` and `key` ([tokens, heads * size])."""
    width = cos_sin_cache.shape[-1]
    cos, sin = cos_sin_cache[positions.long().flatten()].float()[:, None].chunk(2, -1)
    for rows in (query, key):
        if rows is None:
            continue
        heads = rows.view(rows.shape[0], -1, head_size)
        turned = heads[..., :width].float()
        one, other = turned.chunk(2, -1) if is_neox else (turned[..., ::2], turned[..., 1::2])
        first, second = one * cos - other * sin, other * cos + one * sin
        joined = torch.cat([first, second], -1) if is_neox else torch.stack([first, second], -1).flatten(-2)
        heads[..., :width] = joined.to(rows.dtype)
