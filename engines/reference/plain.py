"""Owns the run to compare with: one process, the whole prompt at once, transformers' own cache, nothing of pdlink."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache

from pdlink_engines.reference.decode import Generation
from pdlink_engines.reference.models import ReferenceModel


def generate_plain(model: ReferenceModel, prompt: Sequence[int], *, max_new_tokens: int) -> Generation:
    """Generate greedily, up to `max_new_tokens` or one of the model's stop tokens, with the logits of every step."""
    cache = DynamicCache(config=model.network.config)
    feed = list(prompt)
    tokens: list[int] = []
    rows: list[torch.Tensor] = []
    while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in model.stop_tokens):
        with torch.no_grad():
            output = model.network(input_ids=torch.tensor([feed]), cache=cache, use_cache=True, logits_to_keep=1)
        rows.append(output.logits[0, -1].float())
        tokens.append(int(rows[-1].argmax()))
        feed = tokens[-1:]
    logits = torch.stack(rows)
    return Generation(tuple(tokens), logits[1:], logits[0])
