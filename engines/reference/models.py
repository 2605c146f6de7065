"""Owns the names of the reference models and what a loaded one is. How each is made lies in a module of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdlink.errors import InvalidInput
from pdlink.layout.components import CacheLayout
from pdlink_engines.reference import glm_tiny, smollm2
from pdlink_engines.reference.shapes import CacheShape
from pdlink_engines.reference.tokens import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class ReferenceModel:
    """A model that can run: its network in eval mode without gradients, its tokenizer, and what it caches.

    `stop_tokens` end a generation. `max_tokens` bounds prompt and generated tokens together.
    """

    name: str
    network: PreTrainedModel
    tokenizer: Tokenizer
    shape: CacheShape
    vocab_size: int
    max_tokens: int
    stop_tokens: frozenset[int]

    def layout(self, page_size: int) -> CacheLayout:
        return self.shape.layout(page_size)


@dataclass(frozen=True, slots=True)
class _Source:
    shape: CacheShape
    prepare: Callable[[], None]
    load: Callable[[], tuple[PreTrainedModel, Tokenizer]]
    stop_tokens: frozenset[int]
    num_heads: int
    """Heads that tensor parallelism can split: of keys and values where these have heads, else of the queries."""


_SOURCES = {
    glm_tiny.NAME: _Source(glm_tiny.SHAPE, glm_tiny.prepare, glm_tiny.load, glm_tiny.STOP_TOKENS, glm_tiny.NUM_HEADS),
    smollm2.NAME: _Source(smollm2.SHAPE, smollm2.prepare, smollm2.load, smollm2.STOP_TOKENS, smollm2.SHAPE.kv_heads),
}
MODEL_NAMES = tuple(_SOURCES)


def _source(name: str) -> _Source:
    try:
        return _SOURCES[name]
    except KeyError:
        raise InvalidInput(f"unknown model {name!r}; known models: {', '.join(MODEL_NAMES)}") from None


def model_shape(name: str) -> CacheShape:
    """What `name` caches per token, without loading it. Raises `InvalidInput` for a name that is not known."""
    return _source(name).shape


def model_heads(name: str) -> int:
    """How many ranks can share the heads of `name` at most. Raises `InvalidInput` for a name that is not known."""
    return _source(name).num_heads


def prepare_model(name: str) -> None:
    """Do once, before several processes load `name`, what they would otherwise each do (converting weights)."""
    _source(name).prepare()


def load_model(name: str) -> ReferenceModel:
    """Load `name`. Raises `InvalidInput` when it is unknown, or when its weights are not installed."""
    source = _source(name)
    network, tokenizer = source.load()
    network.train(False)
    network.requires_grad_(False)
    return ReferenceModel(
        name=name,
        network=network,
        tokenizer=tokenizer,
        shape=source.shape,
        vocab_size=int(network.config.vocab_size),
        max_tokens=int(network.config.max_position_embeddings),
        stop_tokens=source.stop_tokens,
    )


def fix_threads(num_threads: int = 1) -> None:
    """Set torch's thread count for this process: results repeat bit for bit only at a fixed count."""
    import torch

    torch.set_num_threads(num_threads)
