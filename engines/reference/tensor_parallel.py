"""Owns attention that is split by heads over tensor-parallel ranks. It copies no weights: slices are views of them.

What attention caches is split with it where it has heads of its own (GQA), and whole on every rank where it has none
(MLA latent rows, indexer keys). Everything else of a layer caches nothing and runs whole on every rank.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from pdlink_engines.reference.group import RankGroup
from pdlink_engines.reference.models import ReferenceModel
from pdlink_engines.reference.shapes import head_range


class TpGroup(RankGroup):
    """The tensor-parallel ranks of one instance. Sums are made in rank order, so that all ranks have equal bits."""

    axis = "tp"

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `partial`."""
        return self.stack(partial, "sum of attention outputs").sum(dim=0)


class SummedLinear(nn.Module):
    """A projection of which this rank has some inputs: the outputs of all ranks are summed."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, group: TpGroup) -> None:
        super().__init__()
        self._weight, self._bias, self._group = weight, bias, group

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        whole = self._group.sum(nn.functional.linear(inputs, self._weight))
        return whole if self._bias is None else whole + self._bias


def split_layers(model: ReferenceModel, group: TpGroup) -> list[nn.Module] | None:
    """The model's layers with this rank's heads only, for `Stage`; None where one rank has them all.

    Raises `InvalidInput` with more ranks than heads to split.
    """
    if group.size == 1:
        return None
    return [_split_layer(layer, group) for layer in model.network.model.layers]


def _split_layer(layer: Any, group: TpGroup) -> nn.Module:
    clone = _shallow(layer)
    latent = hasattr(layer.self_attn, "kv_b_proj")
    clone.self_attn = (_split_latent if latent else _split_heads)(layer.self_attn, group)
    return clone


def _split_heads(attention: Any, group: TpGroup) -> nn.Module:
    """GQA: this rank's KV heads, and the query heads that look at them."""
    dims, queries = attention.head_dim, attention.num_key_value_groups
    mine = head_range(attention.k_proj.out_features // dims, group.size, group.rank)
    clone = _shallow(attention)
    clone.k_proj = _outputs(attention.k_proj, mine, dims)
    clone.v_proj = _outputs(attention.v_proj, mine, dims)
    clone.q_proj = _outputs(attention.q_proj, mine, dims * queries)
    clone.o_proj = _inputs(attention.o_proj, mine, dims * queries, group)
    return clone


def _split_latent(attention: Any, group: TpGroup) -> nn.Module:
    """MLA: this rank's heads of the expansion; the latent row and the indexer stay whole."""
    mine = head_range(attention.num_heads, group.size, group.rank)
    clone = _shallow(attention)
    clone.q_b_proj = _outputs(attention.q_b_proj, mine, attention.qk_head_dim)
    clone.kv_b_proj = _outputs(attention.kv_b_proj, mine, attention.qk_nope_head_dim + attention.v_head_dim)
    clone.o_proj = _inputs(attention.o_proj, mine, attention.v_head_dim, group)
    return clone


def _shallow(module: nn.Module) -> nn.Module:
    """The same module with a set of children of its own."""
    clone = copy.copy(module)
    clone._modules = dict(module._modules)
    return clone


def _outputs(linear: nn.Linear, heads: range, width: int) -> nn.Linear:
    rows = slice(heads.start * width, heads.stop * width)
    part = nn.Linear(linear.in_features, len(heads) * width, bias=linear.bias is not None, device="meta")
    part.weight = nn.Parameter(linear.weight[rows], requires_grad=False)
    if linear.bias is not None:
        part.bias = nn.Parameter(linear.bias[rows], requires_grad=False)
    return part


def _inputs(linear: nn.Linear, heads: range, width: int, group: TpGroup) -> SummedLinear:
    columns = slice(heads.start * width, heads.stop * width)
    return SummedLinear(linear.weight[:, columns], linear.bias, group)
