"""Owns the translation of vLLM's `KVCacheConfig` of an MLA + DSA model into layout values. It imports no vLLM.

`KVCacheConfig` (vllm/v1/kv_cache_interface.py, 0.33.0) names layers, gives each a spec, puts the layers in cache groups
and places them in one allocation by offset and strides. A cache group has one block table, so it becomes one page
group. A worker's config has its own layers only; the layout of the model comes from the configs of all stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np

from pdlink.errors import LayoutError
from pdlink.layout.components import DRAFT_PREFIX, CacheLayout, Component, index_k, latent
from pdlink.layout.regions import MemoryKind, Region

_GROUPED = "UniformTypeKVCacheSpecs"
_MLA = "MLAAttentionSpec"
_ROLES = {"sparse": "latent", "indexer": "index_k"}
_SCALE_BYTES = 4


class CacheTensor(Protocol):
    """`KVCacheTensor`: page of block b of `layers[l]` is at `offset + l * layer_stride + b * block_stride`."""

    size: int
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int
    host_resident: bool


class CacheGroup(Protocol):
    """`KVCacheGroupSpec`. `kv_cache_spec` is one spec for all layers, or a `UniformTypeKVCacheSpecs` with one each."""

    layer_names: list[str]
    kv_cache_spec: Any
    host_resident: bool
    enable_kv_transfer: bool


class CacheConfig(Protocol):
    """The attributes of `KVCacheConfig` that are read."""

    num_blocks: int
    kv_cache_tensors: Sequence[Any]
    kv_cache_groups: Sequence[Any]
    hisparse_host_num_blocks: int | None
    hisparse_shared_host_pool: bool


@dataclass(frozen=True, slots=True)
class DsaModel:
    """What `KVCacheConfig` does not say.

    Layer numbers from `num_layers` on are the draft's. `kernel_block_tokens` is the block that the indexer's kernels
    take: vLLM splits a larger block into so many pages, each with its keys first and its scales after them.
    """

    num_layers: int
    kernel_block_tokens: int = 64
    index_head_dim: int = 128
    index_quant_block: int = 128

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.kernel_block_tokens < 1:
            raise LayoutError(
                f"a DSA model needs num_layers and kernel_block_tokens of at least 1, got {self.num_layers} and "
                f"{self.kernel_block_tokens}"
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
class BlockTable:
    """One transferable cache group: its page group, and how its block ids become page ids.

    `group_id` is the index in `KVCacheConfig.kv_cache_groups`. A block is `pages_per_block` neighbouring pages.
    """

    group_id: int
    page_group: str
    block_size: int
    pages_per_block: int

    def pages(self, block_ids: Sequence[int]) -> np.ndarray:
        """int64 page ids of `block_ids`, in token order."""
        first = np.asarray(block_ids, dtype=np.int64)[:, None] * self.pages_per_block
        return (first + np.arange(self.pages_per_block, dtype=np.int64)).reshape(-1)


@dataclass(frozen=True, slots=True)
class Allocation:
    """The one piece of memory that the regions of a kind lie in. Register it whole: regions interleave inside it, and
    those of different groups may share bytes (a block belongs to one group at a time)."""

    base_address: int
    nbytes: int
    memory: MemoryKind
    device: int


@dataclass(frozen=True, slots=True)
class VllmCache:
    """One worker's `KVCacheConfig` as layout values. `skipped` are layers that vLLM keeps out of transfers."""

    layout: CacheLayout
    owned: Mapping[str, tuple[int, ...]]
    regions: tuple[Region, ...]
    block_tables: tuple[BlockTable, ...]
    allocations: tuple[Allocation, ...]
    skipped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer of a transferable group: what it is in pdlink's words, beside its own spec."""

    name: str
    component: str
    layer: int
    group_id: int
    page_group: str
    spec: Any


def cache_layout(configs: Sequence[CacheConfig], model: DsaModel) -> CacheLayout:
    """The layout of the whole model from the configs of all its stages (ranks that repeat a stage do no harm).

    Raises `LayoutError` naming the layer and the attribute for a cache that is not MLA latent or DSA index keys, and
    for layers of one component that differ in anything but their number.
    """
    found: dict[str, Component] = {}
    ids: dict[str, set[int]] = {}
    layers = [one for config in configs for one in _layers(config, model)]
    split = {one.page_group for one in layers if one.component.endswith("index_k")}
    for one in layers:
        made = _component(one, model, one.page_group in split)
        kept = found.setdefault(one.component, made)
        if kept != made:
            raise LayoutError(f"{one.name} differs from other layers of {one.component!r}: {_difference(made, kept)}")
        ids.setdefault(one.component, set()).add(one.layer)
    parts = tuple(replace(part, layers=tuple(sorted(ids[name]))) for name, part in sorted(found.items(), key=_order))
    drafts = [layer for name, members in ids.items() if name.startswith(DRAFT_PREFIX) for layer in members]
    return CacheLayout(model.num_layers, parts, max(drafts, default=-1) + 1)


def translate(
    config: CacheConfig,
    layout: CacheLayout,
    model: DsaModel,
    *,
    address: int,
    memory: MemoryKind = MemoryKind.CUDA,
    device: int = 0,
    host_address: int | None = None,
) -> VllmCache:
    """Layout values of one worker's `config`, whose allocation starts at `address`.

    `host_address` is where the host pool starts, for groups that vLLM keeps in host memory (HiSparse). Raises
    `LayoutError` naming the layer and both values where config and `layout` differ or a placement is not whole.
    """
    if config.hisparse_shared_host_pool:
        raise LayoutError(
            "hisparse_shared_host_pool is True; a pool shared by tp ranks cannot be described, turn it off"
        )
    layers = {one.name: one for one in _layers(config, model)}
    tables = _block_tables(config, layout)
    ratios = {one.group_id: one.pages_per_block for one in tables}
    regions: dict[str, Region] = {}
    allocations: dict[MemoryKind, Allocation] = {}
    for tensor in config.kv_cache_tensors:
        names = [name for name in tensor.layers if name in layers]
        if not names:
            continue
        home = _allocation(tensor, address, memory, device, host_address)
        if allocations.setdefault(home.memory, home) != home:
            raise LayoutError(
                f"the tensor of {names[0]} says size={home.nbytes}, others say {allocations[home.memory].nbytes}"
            )
        for index, name in enumerate(tensor.layers):
            if name in regions:
                raise LayoutError(f"{name} has two kv_cache_tensors")
            if name in layers:
                one = layers[name]
                regions[name] = _region(one, layout, config, tensor, index, home, ratios[one.group_id])
    missing = sorted(set(layers) - set(regions))
    if missing:
        raise LayoutError(f"{missing[0]} has no kv_cache_tensor")
    ordered = tuple(sorted(regions.values(), key=lambda one: (_order((one.component, None)), one.layer)))
    owned = {part.name: tuple(r.layer for r in ordered if r.component == part.name) for part in layout.components}
    skipped = tuple(
        name for group in config.kv_cache_groups if not group.enable_kv_transfer for name in group.layer_names
    )
    return VllmCache(layout, owned, ordered, tables, tuple(allocations.values()), skipped)


def _difference(made: Component, kept: Component) -> str:
    names = [one.name for one in fields(Component) if getattr(made, one.name) != getattr(kept, one.name)]
    return ", ".join(f"{name} {getattr(made, name)!r} and {getattr(kept, name)!r}" for name in names)


def _order(item: tuple[str, object]) -> tuple[bool, bool, str]:
    """Target before draft, latent before index keys."""
    name = item[0]
    return name.startswith(DRAFT_PREFIX), name.endswith("index_k"), name


def _page_group(index: int) -> str:
    return f"group{index}"


def _layers(config: CacheConfig, model: DsaModel) -> Iterator[_Layer]:
    """Every layer of the transferable groups. Group names count those alone, as connectors are given their blocks."""
    index = 0
    for group_id, group in enumerate(config.kv_cache_groups):
        if not group.enable_kv_transfer:
            continue
        for name, spec in _specs(group):
            _check_spec(name, spec, group.kv_cache_spec.block_size)
            number = _layer_number(name)
            drafted = number >= model.num_layers
            if bool(spec.is_draft) != drafted and _is_grouped(group):
                raise LayoutError(f"{name} has is_draft={spec.is_draft}, the model has {model.num_layers} layers")
            role = _ROLES[_text(spec.cache_role)]
            component = DRAFT_PREFIX + role if drafted else role
            layer = number - model.num_layers if drafted else number
            yield _Layer(name, component, layer, group_id, _page_group(index), spec)
        index += 1


def _is_grouped(group: CacheGroup) -> bool:
    return type(group.kv_cache_spec).__name__ == _GROUPED


def _specs(group: CacheGroup) -> list[tuple[str, Any]]:
    if not _is_grouped(group):
        return [(name, group.kv_cache_spec) for name in group.layer_names]
    specs: Mapping[str, Any] = group.kv_cache_spec.kv_cache_specs
    if set(specs) != set(group.layer_names):
        strange = sorted(set(specs) ^ set(group.layer_names))
        raise LayoutError(f"layer_names and kv_cache_specs of a cache group differ in {strange[0]}")
    return [(name, specs[name]) for name in group.layer_names]


def _check_spec(name: str, spec: Any, block_size: int) -> None:
    kind = type(spec).__name__
    if kind != _MLA:
        raise LayoutError(f"{name} has a {kind}; only {_MLA} (latent and DSA index keys) can be described")
    if _text(spec.cache_role) not in _ROLES:
        raise LayoutError(f"{name} has cache_role {_text(spec.cache_role)!r}; known are {', '.join(_ROLES)}")
    plain = {"tokens_per_state": 1, "num_heads": 1, "sliding_window": None, "model_version": None}
    for attribute, value in plain.items():
        if getattr(spec, attribute) != value:
            raise LayoutError(f"{name} has {attribute}={getattr(spec, attribute)!r}; only {value!r} can be described")
    if spec.block_size != block_size:
        raise LayoutError(f"{name} has block_size={spec.block_size} in a cache group of block_size={block_size}")


def _layer_number(name: str) -> int:
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise LayoutError(f"layer name {name!r} has {len(numbers)} numbers, one of them must say which layer it is")
    return numbers[0]


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


def _component(one: _Layer, model: DsaModel, split: bool) -> Component:
    """The component of a layer, without its layers; `split` where the group's pages are kernel blocks."""
    spec, page_size = one.spec, one.spec.block_size
    ratio = 1
    if split:
        ratio, rest = divmod(page_size, model.kernel_block_tokens)
        if rest:
            raise LayoutError(
                f"{one.name} has block_size={page_size}, not a multiple of kernel_block_tokens="
                f"{model.kernel_block_tokens}; set --block-size to one"
            )
        page_size = model.kernel_block_tokens
    if ratio > 1 and spec.page_size_bytes != spec.unpadded_page_size_bytes:
        raise LayoutError(
            f"{one.name} pads its block of {spec.unpadded_page_size_bytes} bytes to {spec.page_size_bytes}, so it "
            f"cannot be {ratio} pages; set --block-size to {model.kernel_block_tokens}"
        )
    row = spec.state_content_size_bytes
    if one.component.endswith("index_k"):
        if row != model.index_head_dim + model.index_scale_bytes:
            raise LayoutError(
                f"{one.name} has {row} bytes a token, index_head_dim={model.index_head_dim} needs "
                f"{model.index_head_dim} and {model.index_scale_bytes} of scales"
            )
        made = index_k(page_size, (), key_bytes=model.index_head_dim, scale_bytes=model.index_scale_bytes)
    else:
        packed = spec.state_content_bytes is not None
        dtype = spec.cache_dtype_str if packed else str(spec.dtype).removeprefix("torch.")
        made = latent(page_size, (), bytes_per_token=row, dtype=dtype)
    nbytes = spec.page_size_bytes // ratio
    return replace(made, name=one.component, page_bytes=nbytes, page_group=one.page_group)


def _block_tables(config: CacheConfig, layout: CacheLayout) -> tuple[BlockTable, ...]:
    tables: list[BlockTable] = []
    for group_id, group in enumerate(config.kv_cache_groups):
        if group.enable_kv_transfer:
            name, block_size = _page_group(len(tables)), group.kv_cache_spec.block_size
            page_size = layout.page_group(name).page_size
            if block_size % page_size:
                raise LayoutError(f"cache group {group_id} has block_size={block_size}, {name} pages of {page_size}")
            tables.append(BlockTable(group_id, name, block_size, block_size // page_size))
    return tuple(tables)


def _allocation(
    tensor: CacheTensor, address: int, memory: MemoryKind, device: int, host_address: int | None
) -> Allocation:
    if not tensor.host_resident:
        return Allocation(address, tensor.size, memory, device)
    if host_address is None:
        raise LayoutError(f"{tensor.layers[0]} is in vLLM's host pool; give host_address")
    return Allocation(host_address, tensor.size, MemoryKind.HOST, 0)


def _region(
    one: _Layer,
    layout: CacheLayout,
    config: CacheConfig,
    tensor: CacheTensor,
    index: int,
    home: Allocation,
    ratio: int,
) -> Region:
    component = layout.component(one.component)
    if one.layer not in component.layers or component.page_bytes * ratio != one.spec.page_size_bytes:
        raise LayoutError(
            f"{one.name} has blocks of {one.spec.page_size_bytes} bytes, the layout has {one.component!r} in layers "
            f"{list(component.layers)} with {ratio} pages of {component.page_bytes}"
        )
    if ratio > 1 and tensor.block_stride != one.spec.page_size_bytes:
        raise LayoutError(
            f"{one.name} has block_stride={tensor.block_stride} and blocks of {one.spec.page_size_bytes} bytes, so a "
            f"block cannot be {ratio} pages; set VLLM_KV_CACHE_LAYOUT=LBNHC"
        )
    num_blocks = config.hisparse_host_num_blocks if tensor.host_resident else config.num_blocks
    if num_blocks is None:
        raise LayoutError(f"{one.name} is in vLLM's host pool, hisparse_host_num_blocks is None")
    start = home.base_address + tensor.offset + index * tensor.layer_stride
    made = Region(
        one.component,
        one.layer,
        start,
        tensor.block_stride // ratio,
        component.page_bytes,
        num_blocks * ratio,
        home.memory,
        home.device,
    )
    if made.end_address > home.base_address + home.nbytes:
        raise LayoutError(f"{one.name} ends at byte {made.end_address - home.base_address} of {home.nbytes}")
    return made
