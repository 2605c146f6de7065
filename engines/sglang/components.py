"""Owns the translation of sglang's `KVArgs` into layout values: MLA (with DSA index keys or without), and K/V heads.

It imports no sglang, and every name that sglang has for a cache lives here.

`KVArgs` is a bag of parallel lists (sglang/srt/disaggregation/base/conn.py, 0.5.23). It says where buffers are and how
long a page is, not what the buffers are: layer ids are mostly empty, a draft's entries are appended at the tail, and
nothing describes the inside of a page. The rest is the engine's knowledge of its model and comes in as `DsaModel` or
`HeadsModel`; whatever the two say twice must agree. A layer is never guessed from a position alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from pdlink.errors import LayoutError
from pdlink.layout.components import DRAFT_PREFIX, CacheLayout, Component, heads, index_k, latent
from pdlink.layout.regions import MemoryKind, Region
from pdlink_engines.sglang.aux_rows import AuxBuffer, buffers_of

KV_PAGES = "kv"
"""Page group of `page_indices`: the latent pages, a draft's too."""
INDEX_PAGES = "dsa"
"""Page group of the DSA entry of `state_indices`, a list of its own: it comes whole, with the last chunk."""

_STATE = "dsa"
_K, _V = "k", "v"
_SCALE_BYTES = 4


class KvArgs(Protocol):
    """The attributes of `KVArgs` that are always read. Optional ones (a stage's first layer, ...) may be missing."""

    kv_data_ptrs: Sequence[int]
    kv_data_lens: Sequence[int]
    kv_item_lens: Sequence[int]
    kv_layer_ids: Sequence[int]
    num_draft_entries: int
    kv_cache_dtype_str: str
    page_size: int
    gpu_id: int
    aux_data_ptrs: Sequence[int]
    aux_data_lens: Sequence[int]
    aux_item_lens: Sequence[int]
    state_types: Sequence[Any]
    state_data_ptrs: Sequence[Sequence[int]]
    state_data_lens: Sequence[Sequence[int]]
    state_item_lens: Sequence[Sequence[int]]
    state_layer_ids: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class DsaModel:
    """What `KVArgs` does not say about the model. Equal on every rank of both sides.

    `index_layers` are the global ids of layers with index keys of their own (not those that share another layer's
    top-k). `latent_bytes_per_token` is one row of a latent buffer; `dtype` is used where sglang says "auto". The draft
    figures are 0 or empty without a draft model, and a draft row is as long as the target's unless given.
    """

    num_layers: int
    index_layers: tuple[int, ...]
    latent_bytes_per_token: int
    dtype: str = "bfloat16"
    num_draft_layers: int = 0
    draft_index_layers: tuple[int, ...] = ()
    draft_latent_bytes_per_token: int = 0
    draft_dtype: str = ""
    index_head_dim: int = 128
    index_quant_block: int = 128

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.num_draft_layers < 0 or self.latent_bytes_per_token < 1:
            raise LayoutError(
                f"a DSA model needs num_layers and latent_bytes_per_token of at least 1, got {self.num_layers} and "
                f"{self.latent_bytes_per_token} (num_draft_layers={self.num_draft_layers})"
            )
        if self.index_quant_block < 1 or self.index_head_dim % self.index_quant_block:
            raise LayoutError(
                f"index_head_dim={self.index_head_dim} is not a multiple of index_quant_block={self.index_quant_block}"
            )

    @property
    def index_scale_bytes(self) -> int:
        """Scale bytes of one token: a float32 for each block of `index_quant_block` key values."""
        return self.index_head_dim // self.index_quant_block * _SCALE_BYTES


@dataclass(frozen=True, slots=True)
class HeadsModel:
    """What `KVArgs` does not say about a model with K and V heads (MHA, GQA). Equal on both sides.

    `num_heads` are the KV heads of one tensor-parallel rank; bytes are those of one head of one token.
    """

    num_layers: int
    num_heads: int
    k_head_bytes: int
    v_head_bytes: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_heads, self.k_head_bytes, self.v_head_bytes) < 1:
            raise LayoutError(
                f"a model with K and V heads needs at least 1 layer, head and byte, got num_layers={self.num_layers}, "
                f"num_heads={self.num_heads}, k_head_bytes={self.k_head_bytes}, v_head_bytes={self.v_head_bytes}"
            )


Model: TypeAlias = DsaModel | HeadsModel


@dataclass(frozen=True, slots=True)
class SglangCache:
    """One rank's `KVArgs` as layout values.

    `owned` has every component of the layout. `regions` keep sglang's order: latent, its draft, then index keys, their
    draft. `elided` lists layers of this rank whose 0-row index buffer sglang carries as a place holder: nothing is
    registered and nothing moves for them.
    """

    layout: CacheLayout
    owned: Mapping[str, tuple[int, ...]]
    regions: tuple[Region, ...]
    aux: tuple[AuxBuffer, ...]
    elided: tuple[tuple[str, int], ...]

    @property
    def aux_bytes(self) -> int:
        """Bytes of one request's aux: a row of every buffer."""
        return sum(one.row_bytes for one in self.aux)


@dataclass(frozen=True, slots=True)
class _Entry:
    """Row `position` of one of sglang's buffer lists, with the layer it stands for."""

    where: str
    component: str
    layer: int
    address: int
    nbytes: int
    item_bytes: int
    memory: MemoryKind

    @property
    def is_elided(self) -> bool:
        return self.nbytes == 0 and self.item_bytes == 0


def cache_layout(model: Model, *, page_size: int, dtype: str) -> CacheLayout:
    """The layout of the whole model, the same on every rank. `dtype` is `KVArgs.kv_cache_dtype_str`.

    sglang writes an indexer page as all keys, then all scales (sglang/srt/mem_cache/index_key_cache.py).
    """
    own = {"auto": model.dtype, "bf16": "bfloat16"}.get(dtype, dtype)
    if isinstance(model, HeadsModel):
        return CacheLayout(
            model.num_layers,
            tuple(
                heads(
                    name,
                    page_size,
                    range(model.num_layers),
                    num_heads=model.num_heads,
                    head_bytes=nbytes,
                    dtype=own,
                )
                for name, nbytes in ((_K, model.k_head_bytes), (_V, model.v_head_bytes))
            ),
        )
    rows = model.draft_latent_bytes_per_token or model.latent_bytes_per_token
    parts = [
        latent(page_size, range(model.num_layers), bytes_per_token=model.latent_bytes_per_token, dtype=own),
        _index(model, page_size, model.index_layers),
        _as_draft(
            latent(page_size, range(model.num_draft_layers), bytes_per_token=rows, dtype=model.draft_dtype or own)
        ),
        _as_draft(_index(model, page_size, model.draft_index_layers)),
    ]
    return CacheLayout(model.num_layers, tuple(one for one in parts if one.layers), model.num_draft_layers)


def translate(kv_args: KvArgs, model: Model, *, memory: MemoryKind, first_layer: int | None = None) -> SglangCache:
    """Layout values of one rank's `kv_args`.

    `memory` is what the pools are made of (`KVArgs` does not say). `first_layer` is the global id of the rank's first
    layer: needed on decode, where `KVArgs` has neither layer ids nor a start. Raises `LayoutError` naming the
    attribute, both values and the fix for anything that is not exactly this model, or that would need a guess.
    """
    _refuse_foreign(kv_args)
    layout = cache_layout(model, page_size=kv_args.page_size, dtype=kv_args.kv_cache_dtype_str)
    if isinstance(model, HeadsModel):
        entries, states = _head_entries(kv_args, model, first_layer, memory), []
    else:
        layers, drafts = _kv_layers(kv_args, model, first_layer)
        entries = _entries(kv_args, _name_entries("latent", layers, drafts), memory)
        states = _state_entries(kv_args, model, layers, drafts, memory)
    held = entries + [one for one in states if not one.is_elided]
    regions = [_region(one, layout, kv_args) for one in held]
    owned = {one.name: tuple(r.layer for r in regions if r.component == one.name) for one in layout.components}
    elided = tuple((one.component, one.layer) for one in states if one.is_elided)
    return SglangCache(layout, owned, tuple(regions), buffers_of(kv_args), elided)


def _index(model: DsaModel, page_size: int, layers: tuple[int, ...]) -> Component:
    made = index_k(page_size, layers, key_bytes=model.index_head_dim, scale_bytes=model.index_scale_bytes)
    return replace(made, page_group=INDEX_PAGES)


def _as_draft(component: Component) -> Component:
    return replace(component, name=DRAFT_PREFIX + component.name)


def _refuse_foreign(kv_args: KvArgs) -> None:
    """Refuse, by name, whatever belongs to a model or mode that these components do not describe."""
    kinds = [str(getattr(kind, "value", kind)) for kind in kv_args.state_types]
    strange = [kind for kind in kinds if kind != _STATE]
    if strange:
        raise LayoutError(
            f"state_types has {strange[0]!r}; only {_STATE!r} (DSA index keys) can be described, serve this model "
            "with sglang's own transfer backend"
        )
    if len(kinds) > 1:
        raise LayoutError(f"state_types has {_STATE!r} {len(kinds)} times; one list of index keys can be described")
    for name in ("kv_layout", "swa_kv_cache_layout", "mla_compression_ratios", "host_kv_data_ptrs", "kv_buf_groups"):
        if (value := getattr(kv_args, name, None)) is not None:
            raise LayoutError(
                f"{name} is {value!r}; only plain pages of MLA (with DSA index keys) or K/V heads can be described"
            )
    if getattr(kv_args, "is_hybrid_mla_backend", False):
        raise LayoutError("is_hybrid_mla_backend is True; hybrid linear-attention pools cannot be described")
    for name in ("state_dim_per_tensor", "state_slice_outer_counts", "state_conv_shard_groups"):
        if any(getattr(kv_args, name, None) or ()):
            raise LayoutError(f"{name} is {getattr(kv_args, name)!r}; DSA index keys are not sliced")


def _kv_layers(kv_args: KvArgs, model: DsaModel, first_layer: int | None) -> tuple[list[int], list[int]]:
    """Global layer of every latent entry, and draft layer of every draft entry."""
    _same_length(kv_args, "kv_data_ptrs", "kv_data_lens", "kv_item_lens")
    total, num_drafts = len(kv_args.kv_data_ptrs), kv_args.num_draft_entries
    if num_drafts not in (0, model.num_draft_layers) or num_drafts > total:
        raise LayoutError(
            f"num_draft_entries is {num_drafts} of {total} kv_data_ptrs, the model has {model.num_draft_layers} draft "
            "layers; start both servers with the same speculative settings"
        )
    num_layers = total - num_drafts
    stated = _stated_layers(kv_args, model, num_layers, num_drafts)
    start = _first_layer(kv_args, first_layer, num_layers)
    if stated is None and start is None and num_layers:
        raise LayoutError(
            f"kv_layer_ids is empty and there is no prefill_start_layer, so the layers of {num_layers} kv_data_ptrs "
            "are unknown; give first_layer"
        )
    counted = None if start is None else list(range(start, start + num_layers))
    if stated is not None and counted is not None and stated != counted:
        raise LayoutError(f"kv_layer_ids says layers {stated}, the start layer says {counted}")
    layers = stated if stated is not None else counted or []
    if layers and (layers[0] < 0 or layers[-1] >= model.num_layers):
        raise LayoutError(f"kv_data_ptrs covers layers {layers[0]} to {layers[-1]} of only {model.num_layers}")
    return layers, list(range(num_drafts))


def _stated_layers(kv_args: KvArgs, model: DsaModel, num_layers: int, num_drafts: int) -> list[int] | None:
    """Layers from `kv_layer_ids`, where sglang numbers draft layers on from the model's; None where it has none."""
    ids = list(kv_args.kv_layer_ids)
    if not ids:
        return None
    if len(ids) != num_layers + num_drafts:
        raise LayoutError(f"kv_layer_ids has {len(ids)} entries, kv_data_ptrs has {num_layers + num_drafts}")
    tail = [model.num_layers + one for one in range(num_drafts)]
    if ids[num_layers:] != tail:
        raise LayoutError(f"kv_layer_ids ends with {ids[num_layers:]}, the draft layers are {tail}")
    layers = ids[:num_layers]
    if any(after <= before for before, after in itertools.pairwise(layers)):
        raise LayoutError(f"kv_layer_ids {layers} does not increase; MLA has one buffer per layer")
    return layers


def _first_layer(kv_args: KvArgs, given: int | None, num_layers: int) -> int | None:
    stated: int | None = getattr(kv_args, "prefill_start_layer", None)
    if stated is not None and given is not None and stated != given:
        raise LayoutError(f"prefill_start_layer is {stated}, first_layer is {given}; give the one that the pool has")
    end: int | None = getattr(kv_args, "prefill_end_layer", None)
    if stated is not None and end is not None and end != stated + num_layers:
        raise LayoutError(
            f"prefill_start_layer {stated} to prefill_end_layer {end} is {end - stated} layers, kv_data_ptrs has "
            f"{num_layers} without the draft"
        )
    return given if stated is None else stated


def _head_entries(kv_args: KvArgs, model: HeadsModel, first_layer: int | None, memory: MemoryKind) -> list[_Entry]:
    """K of every layer of this rank, then V of every layer."""
    _same_length(kv_args, "kv_data_ptrs", "kv_data_lens", "kv_item_lens")
    if kv_args.state_types:
        raise LayoutError(f"state_types has {_STATE!r}, which a model with K and V heads does not cache")
    if kv_args.num_draft_entries:
        raise LayoutError(
            f"num_draft_entries is {kv_args.num_draft_entries}; the draft of a model with K and V heads cannot be "
            "described, start both servers without speculative decoding"
        )
    num_layers, rest = divmod(len(kv_args.kv_data_ptrs), 2)
    if rest:
        raise LayoutError(f"kv_data_ptrs has {len(kv_args.kv_data_ptrs)} entries, not as many for K as for V")
    start = _first_layer(kv_args, first_layer, num_layers)
    ids = list(kv_args.kv_layer_ids)
    if start is None and not ids:
        raise LayoutError("kv_layer_ids is empty and there is no prefill_start_layer; give first_layer")
    layers = ids[:num_layers] if start is None else list(range(start, start + num_layers))
    if ids and ids != layers + layers:
        raise LayoutError(f"kv_layer_ids is {ids}, K and V of layers {layers} were expected")
    if layers and (layers[0] < 0 or layers[-1] >= model.num_layers):
        raise LayoutError(f"kv_data_ptrs covers layers {layers[0]} to {layers[-1]} of only {model.num_layers}")
    return _entries(kv_args, [(name, layer) for name in (_K, _V) for layer in layers], memory)


def _entries(kv_args: KvArgs, named: Sequence[tuple[str, int]], memory: MemoryKind) -> list[_Entry]:
    kinds: Sequence[str] | None = getattr(kv_args, "kv_data_mem_kinds", None)
    if kinds is not None:
        _same_length(kv_args, "kv_data_ptrs", "kv_data_mem_kinds")
    entries = []
    for position, (component, layer) in enumerate(named):
        where = f"kv_data_ptrs[{position}]"
        entries.append(
            _Entry(
                where,
                component,
                layer,
                kv_args.kv_data_ptrs[position],
                kv_args.kv_data_lens[position],
                kv_args.kv_item_lens[position],
                memory if kinds is None else _memory_of(kinds[position], where, memory),
            )
        )
    return entries


def _state_entries(
    kv_args: KvArgs, model: DsaModel, layers: list[int], drafts: list[int], memory: MemoryKind
) -> list[_Entry]:
    """One entry per layer, 0-row place holders included, the draft's at the tail if its model has index keys."""
    _same_length(kv_args, "state_types", "state_data_ptrs", "state_data_lens", "state_item_lens", "state_layer_ids")
    if not kv_args.state_types:
        if model.index_layers:
            raise LayoutError(f"state_types is empty, the model has index keys in layers {list(model.index_layers)}")
        return []
    if kv_args.state_layer_ids[0]:
        raise LayoutError(f"state_layer_ids is {kv_args.state_layer_ids[0]}; sglang gives DSA index keys none")
    ptrs, lens, items = kv_args.state_data_ptrs[0], kv_args.state_data_lens[0], kv_args.state_item_lens[0]
    drafts = drafts if model.draft_index_layers else []
    if not len(ptrs) == len(lens) == len(items) == len(layers) + len(drafts):
        raise LayoutError(
            f"state_data_ptrs, _lens and _item_lens have {len(ptrs)}, {len(lens)} and {len(items)} entries for "
            f"{_STATE!r}; {len(layers)} layers and {len(drafts)} draft layers with index keys need as many"
        )
    entries = []
    for position, (component, layer) in enumerate(_name_entries("index_k", layers, drafts)):
        where = f"state_data_ptrs[0][{position}]"
        one = _Entry(where, component, layer, ptrs[position], lens[position], items[position], memory)
        known = model.draft_index_layers if component.startswith(DRAFT_PREFIX) else model.index_layers
        if one.is_elided == (layer in known):
            holds = "is a 0-row place holder" if one.is_elided else "holds index keys"
            raise LayoutError(f"{where} {holds}, but {component!r} exists in layers {list(known)} and this is {layer}")
        entries.append(one)
    return entries


def _name_entries(component: str, layers: list[int], drafts: list[int]) -> list[tuple[str, int]]:
    return [(component, layer) for layer in layers] + [(DRAFT_PREFIX + component, layer) for layer in drafts]


def _memory_of(kind: str, where: str, memory: MemoryKind) -> MemoryKind:
    if kind not in ("DRAM", "VRAM"):
        raise LayoutError(f"kv_data_mem_kinds of {where} is {kind!r}, not DRAM or VRAM")
    return MemoryKind.HOST if kind == "DRAM" else memory


def _region(entry: _Entry, layout: CacheLayout, kv_args: KvArgs) -> Region:
    component = layout.component(entry.component)
    if entry.item_bytes < 1 or entry.item_bytes % kv_args.page_size:
        raise LayoutError(
            f"item length of {entry.where} is {entry.item_bytes} bytes, not a whole number for each of "
            f"page_size={kv_args.page_size} tokens"
        )
    if entry.item_bytes != component.page_bytes:
        raise LayoutError(
            f"item length of {entry.where} is {entry.item_bytes} bytes, a page of {component.name!r} has "
            f"{component.page_bytes}; describe the storage format that the pool uses"
        )
    num_pages, rest = divmod(entry.nbytes, entry.item_bytes)
    if rest:
        raise LayoutError(f"{entry.where} is {entry.nbytes} bytes, {rest} more than {num_pages} whole pages")
    device = kv_args.gpu_id if entry.memory is MemoryKind.CUDA else 0
    nbytes = entry.item_bytes
    return Region(entry.component, entry.layer, entry.address, nbytes, nbytes, num_pages, entry.memory, device)


def _same_length(kv_args: KvArgs, *names: str) -> None:
    counts = [len(getattr(kv_args, name)) for name in names]
    if len(set(counts)) > 1:
        both = ", ".join(f"{name} {count}" for name, count in zip(names, counts, strict=True))
        raise LayoutError(f"lists of KVArgs differ in length: {both}")
