"""Owns the layer ids of one rank's KV buffers, and what its pool says of the model with them. It moves nothing.

sglang fills `KVArgs.kv_layer_ids` from its function `build_kv_layer_ids`, the one place before a manager is made that
sees the pool itself. The plug-in hooks it, so that what `KVArgs` leaves out travels inside that list.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from pdlink.errors import LayoutError
from pdlink.layout.regions import MemoryKind
from pdlink_engines.sglang.components import DsaModel, HeadsModel, Model

_MLA_POOLS = ("MLATokenToKVPool", "DSATokenToKVPool", "LayerSplitDSATokenToKVPool")
_HEAD_POOLS = ("MHATokenToKVPool",)


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What one rank's KV pool says of the model, of its memory, and whether layers are split over CP ranks."""

    model: Model
    memory: MemoryKind
    is_split: bool


class LayerIds(list[int]):
    """Global layer id of every entry of `KVArgs.kv_data_ptrs`; `facts` is what the pool says besides."""

    def __init__(self, ids: Iterable[int], facts: PoolFacts) -> None:
        super().__init__(ids)
        self.facts = facts


def layer_ids_of(pool: Any, draft_pool: Any, num_draft_entries: int) -> LayerIds:
    """The ids of the buffers that `pool` (and `draft_pool`, where it is sent) hand to PD transfer.

    A draft's ids follow the model's, which is how sglang numbers them. Raises `LayoutError` naming a pool that pdlink
    cannot describe.
    """
    facts = facts_of(pool, draft_pool)
    start, stop = (0, pool.layer_num)
    if facts.is_split:
        start, stop = pool._owned_local_layer_range()
    mine = list(range(pool.start_layer + start, pool.start_layer + stop))
    if isinstance(facts.model, HeadsModel):
        mine = mine + mine
    drafts = [facts.model.num_layers + number for number in range(num_draft_entries)]
    return LayerIds(mine + drafts, facts)


def facts_of(pool: Any, draft_pool: Any = None) -> PoolFacts:
    """What `pool` says. Raises `LayoutError` naming the pool's class, or the option of it that cannot be described."""
    kind = type(pool).__name__
    if kind not in _MLA_POOLS + _HEAD_POOLS:
        raise LayoutError(
            f"KV pool {kind} cannot be described; pdlink serves {', '.join(_MLA_POOLS + _HEAD_POOLS)}, use one of "
            "sglang's own transfer backends for this model"
        )
    if pool.start_layer != 0:
        raise LayoutError(f"KV pool {kind} begins at layer {pool.start_layer}: pipeline stages are not served")
    model = _heads(pool) if kind in _HEAD_POOLS else _mla(pool)
    if draft_pool is not None:
        model = _with_draft(model, draft_pool)
    memory = MemoryKind.CUDA if str(pool.device).startswith("cuda") else MemoryKind.HOST
    return PoolFacts(model, memory, bool(getattr(pool, "layer_shard_enabled", False)))


def _mla(pool: Any) -> DsaModel:
    index_layers: tuple[int, ...] = ()
    if type(pool).__name__ != "MLATokenToKVPool":
        if pool.index_kpool != 1:
            raise LayoutError(f"KV pool {type(pool).__name__} pools index keys (index_kpool={pool.index_kpool})")
        index_layers = tuple(layer for layer, skipped in enumerate(pool.skip_topk_layers) if not skipped)
    if getattr(pool, "dcp_replicated", False):
        raise LayoutError(f"KV pool {type(pool).__name__} is replicated for decode context parallelism")
    if pool.kv_scale_buffer is not None:
        raise LayoutError(f"KV pool {type(pool).__name__} keeps scales beside its rows (kv_scale_buffer)")
    more: dict[str, int] = {}
    if index_layers:
        more = {"index_head_dim": pool.index_head_dim, "index_quant_block": pool.quant_block_size}
    return DsaModel(
        num_layers=pool.layer_num,
        index_layers=index_layers,
        latent_bytes_per_token=pool.kv_cache_dim * pool.store_dtype.itemsize,
        dtype=_name(pool.dtype),
        **more,
    )


def _heads(pool: Any) -> HeadsModel:
    if pool.kv_cache_layout != "nhd":
        raise LayoutError(f"KV pool {type(pool).__name__} has kv_cache_layout {pool.kv_cache_layout!r}, not 'nhd'")
    if pool.k_scale_buffer is not None:
        raise LayoutError(f"KV pool {type(pool).__name__} keeps scales beside its rows (k_scale_buffer)")
    size = pool.store_dtype.itemsize
    return HeadsModel(pool.layer_num, pool.head_num, pool.head_dim * size, pool.v_head_dim * size, _name(pool.dtype))


def _with_draft(model: Model, draft_pool: Any) -> Model:
    draft = facts_of(draft_pool).model
    if not isinstance(model, DsaModel) or not isinstance(draft, DsaModel):
        raise LayoutError(
            f"draft pool {type(draft_pool).__name__} beside a {type(model).__name__}: only an MLA draft of an MLA "
            "model can be described, start both servers without speculative decoding"
        )
    return replace(
        model,
        num_draft_layers=draft.num_layers,
        draft_index_layers=draft.index_layers,
        draft_latent_bytes_per_token=draft.latent_bytes_per_token,
        draft_dtype=draft.dtype,
    )


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
