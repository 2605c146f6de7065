"""Owns a forward through layers of a model: those of one pipeline stage, or all. It moves nothing between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import Cache

from pdlink.errors import InvalidInput
from pdlink_engines.reference.models import ReferenceModel


@dataclass(frozen=True, slots=True)
class Activations:
    """What a layer hands to the next: `hidden` [1, rows, values], and `choice`, int32 [1, rows, chosen tokens], of the
    latest indexer, for layers that share it; None where there is no indexer."""

    hidden: torch.Tensor
    choice: torch.Tensor | None = None


class Stage:
    """The layers [first, end) of a model, with its embedding in front of layer 0 and its head behind the last one.

    `layers` replaces the model's own modules of those layers, one each (see `tensor_parallel`).
    """

    def __init__(
        self, model: ReferenceModel, span: range | None = None, layers: Sequence[torch.nn.Module] | None = None
    ) -> None:
        num_layers = model.shape.num_layers
        self.span = range(num_layers) if span is None else span
        if not self.span or self.span.start < 0 or self.span.stop > num_layers:
            raise InvalidInput(
                f"a stage needs some of the {num_layers} layers of model {model.name!r}, got {self.span}"
            )
        self.vocab_size = model.vocab_size
        self._network = model.network
        self._inner = model.network.model
        self._layers = list(self._inner.layers[self.span.start : self.span.stop] if layers is None else layers)
        self._topk = getattr(model.network.config, "index_topk", 0)

    @property
    def is_first(self) -> bool:
        return self.span.start == 0

    @property
    def is_last(self) -> bool:
        return self.span.stop == len(self._inner.layers)

    def incoming(self, num_rows: int, num_keys: int) -> Activations:
        """Room for what comes from the stage before, for queries of `num_rows` tokens over `num_keys` keys."""
        return self._room(self.span.start, num_rows, num_keys)

    def outgoing(self, activations: Activations) -> Activations:
        """What of `activations` the next stage needs: no choice where its first layer makes one itself."""
        return activations if self._shares(self.span.stop) else Activations(activations.hidden)

    def run(
        self,
        came: Activations | None,
        tokens: Sequence[int],
        positions: Sequence[int],
        mask: torch.Tensor,
        cache: Cache,
    ) -> Activations:
        """Run `tokens`, at `positions`, through the layers; `came` is from the stage before, None on the first."""
        position_ids = torch.tensor([list(positions)])
        hidden = self._inner.embed_tokens(torch.tensor([list(tokens)])) if came is None else came.hidden
        choice = came.choice if came is not None else None
        rotary = self._inner.rotary_emb(hidden, position_ids=position_ids)
        for layer in self._layers:
            more = {"prev_topk_indices": choice} if self._topk else {}
            output = layer(
                hidden,
                attention_mask=mask,
                position_embeddings=rotary,
                position_ids=position_ids,
                cache=cache,
                use_cache=True,
                **more,
            )
            hidden, choice = output if self._topk else (output, None)
        return Activations(hidden, choice)

    def logits(self, activations: Activations, row: int) -> torch.Tensor:
        """float32 [vocab] of one row, on the last stage."""
        chosen = self._inner.norm(activations.hidden)[:, torch.tensor([row])]
        logits: torch.Tensor = self._network.lm_head(chosen)[0, 0].float().contiguous()
        return logits

    def _shares(self, layer: int) -> bool:
        """Whether `layer` uses the choice of an earlier layer's indexer."""
        return bool(getattr(self._inner.layers[layer].self_attn, "skip_topk", False))

    def _room(self, layer: int, num_rows: int, num_keys: int) -> Activations:
        weight = self._inner.embed_tokens.weight
        hidden = weight.new_empty((1, num_rows, weight.shape[1]))
        width = min(self._topk, num_keys)
        choice = torch.empty((1, num_rows, width), dtype=torch.int32) if self._shares(layer) else None
        return Activations(hidden, choice)
