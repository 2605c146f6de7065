"""Owns greedy generation from pages that already hold a prompt. How they were filled is not its concern."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from pdlink.errors import InvalidInput
from pdlink.memory.forward import ReadSpan
from pdlink_engines.reference.gather import keep_rows
from pdlink_engines.reference.models import ReferenceModel
from pdlink_engines.reference.paged_cache import PagedCache, causal_mask, slots_of
from pdlink_engines.reference.pool import PagedPool
from pdlink_engines.reference.stage import Stage
from pdlink_engines.reference.tensor_parallel import TpGroup, split_layers


@dataclass(frozen=True, slots=True)
class Generation:
    """Tokens and the logits that gave them: float32 [len(tokens) - 1, vocab], row i for tokens[i + 1].

    `first_logits` float32 [vocab] gave tokens[0], where they are known (decode receives the first token alone).
    """

    tokens: tuple[int, ...]
    logits: torch.Tensor
    first_logits: torch.Tensor | None = None


def generate(
    model: ReferenceModel,
    pool: PagedPool,
    page_ids: Sequence[int],
    prompt: Sequence[int],
    first_token: int,
    *,
    max_new_tokens: int,
    group: TpGroup | None = None,
) -> Generation:
    """Go on from `first_token`, greedily, up to `max_new_tokens` in all or one of the model's stop tokens.

    `pool` has every layer, and with several ranks in `group` this rank's heads only, where the cache has heads; all of
    them make the same calls in the same order. `page_ids` hold the cache of `prompt` and have room for the new tokens,
    whose rows are written behind it. Raises `InvalidInput` when they have not.
    """
    steps = generation_steps(model, pool, page_ids, prompt, first_token, max_new_tokens=max_new_tokens, group=group)
    tokens = [first_token]
    rows: list[torch.Tensor] = []
    for token, logits in steps:
        tokens.append(token)
        rows.append(logits)
    logits = torch.stack(rows) if rows else torch.empty((0, model.vocab_size))
    return Generation(tuple(tokens), logits)


def generation_steps(
    model: ReferenceModel,
    pool: PagedPool,
    page_ids: Sequence[int],
    prompt: Sequence[int],
    first_token: int,
    *,
    max_new_tokens: int,
    group: TpGroup | None = None,
) -> Iterator[tuple[int, torch.Tensor]]:
    """As `generate`, a token at a time: those after `first_token`, each with its logits, float32 [vocab].

    Nothing is computed before a token is asked for. Steps of several requests may take turns, on pages of their own.
    """
    page_size = pool.layout.components[0].page_size
    room = len(page_ids) * page_size
    needed = len(prompt) + max_new_tokens - 1
    if max_new_tokens < 1 or not prompt:
        raise InvalidInput(f"generation needs a prompt and max_new_tokens of at least 1, got {max_new_tokens}")
    if needed > min(room, model.max_tokens):
        raise InvalidInput(
            f"{len(prompt)} prompt tokens and {max_new_tokens} new ones need room for {needed}, but "
            f"{len(page_ids)} pages of {page_size} hold {room} and model {model.name!r} allows {model.max_tokens}"
        )
    slots = slots_of(page_ids, page_size, 0, needed)
    stage = Stage(model, layers=split_layers(model, group or TpGroup()))
    return _steps(stage, model, pool, page_ids, slots, len(prompt), first_token, max_new_tokens)


def _steps(
    stage: Stage,
    model: ReferenceModel,
    pool: PagedPool,
    page_ids: Sequence[int],
    slots: torch.Tensor,
    num_prompt: int,
    token: int,
    max_new_tokens: int,
) -> Iterator[tuple[int, torch.Tensor]]:
    for position in range(num_prompt, num_prompt + max_new_tokens - 1):
        if token in model.stop_tokens:
            return
        logits = _step(stage, model, pool, page_ids, slots, position, token)
        token = int(logits.argmax())
        yield token, logits


def _step(
    stage: Stage,
    model: ReferenceModel,
    pool: PagedPool,
    page_ids: Sequence[int],
    slots: torch.Tensor,
    position: int,
    token: int,
) -> torch.Tensor:
    """Run `token` at `position` on top of the cache of all tokens before it; returns float32 [vocab]."""
    page_size = pool.layout.components[0].page_size
    pool.begin_forward([ReadSpan(page_ids[: -(-position // page_size)], position)])
    cache = PagedCache(pool, model.shape, all_slots=slots[: position + 1], prefix=position, gather=keep_rows)
    with torch.no_grad():
        output = stage.run(None, [token], [position], causal_mask([position], position + 1), cache)
        logits = stage.logits(output, 0)
    pool.end_forward()
    return logits
