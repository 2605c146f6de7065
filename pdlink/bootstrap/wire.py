"""Owns the translation between the values that several protocols share and protobuf, with every bound checked on entry.

What arrives is from strangers: each reader names the field that it refuses (`FrameError`) before it builds a value.
Messages of the bootstrap service alone are in `service_wire`, errors in `error_wire`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from pdlink.bootstrap.messages import ProtocolRange, Side, check_name
from pdlink.errors import FrameError, InvalidInput
from pdlink.layout import (
    CacheLayout,
    Component,
    Field,
    Fingerprint,
    MemoryKind,
    OwnedLayers,
    ParallelSizes,
    PlanKind,
    RankCoordinates,
    Region,
)
from pdlink.v1 import common_pb2 as pb

MAX_LAYERS = 4096
MAX_COMPONENTS = 64
MAX_FIELDS = 16
MAX_ROWS = 1 << 22
"""Token rows of one page, over all fields and heads of a layout: what checking it may cost."""
MAX_FINGERPRINT_ITEMS = 1024
MAX_VALUE_CHARS = 32 << 10
MAX_TEXT_CHARS = 1024

_PLAN_KINDS = {PlanKind.SPLIT: pb.PLAN_KIND_SPLIT, PlanKind.REPLICATED: pb.PLAN_KIND_REPLICATED}
_MEMORY_KINDS = {MemoryKind.HOST: pb.MEMORY_KIND_HOST, MemoryKind.CUDA: pb.MEMORY_KIND_CUDA}
_PLAN_KINDS_READ = {wire: value for value, wire in _PLAN_KINDS.items()}
_MEMORY_KINDS_READ: dict[int, MemoryKind] = {wire: value for value, wire in _MEMORY_KINDS.items()}


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn a refused value inside into a `FrameError` that says where in the message it was."""
    try:
        yield
    except FrameError:
        raise
    except InvalidInput as error:
        raise FrameError(f"{what}: {error}") from error


def bounded(what: str, count: int, most: int) -> None:
    if count > most:
        raise FrameError(f"{what} has {count} entries; at most {most}")


def clip(text: str, most: int = MAX_TEXT_CHARS) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def pack_side(side: Side) -> pb.Side:
    return pb.Side(protocol=pack_protocol(side.protocol), fingerprint=pack_fingerprint(side.fingerprint))


def unpack_side(message: pb.Side) -> Side:
    return Side(unpack_protocol(message.protocol), unpack_fingerprint(message.fingerprint))


def pack_protocol(value: ProtocolRange) -> pb.ProtocolRange:
    return pb.ProtocolRange(least=value.least, greatest=value.greatest)


def unpack_protocol(message: pb.ProtocolRange) -> ProtocolRange:
    with reading("protocol"):
        return ProtocolRange(message.least, message.greatest)


def pack_fingerprint(value: Fingerprint) -> pb.Fingerprint:
    return pb.Fingerprint(items=[pb.FingerprintItem(name=name, value=text) for name, text in value.items])


def unpack_fingerprint(message: pb.Fingerprint) -> Fingerprint:
    bounded("fingerprint", len(message.items), MAX_FINGERPRINT_ITEMS)
    if not message.items:
        raise FrameError("fingerprint has no items")
    items = tuple((one.name, one.value) for one in message.items)
    with reading("fingerprint"):
        for name, text in items:
            check_name("item", name)
            if len(text) > MAX_VALUE_CHARS or not text.isprintable():
                raise FrameError(f"fingerprint item {name!r} is not at most {MAX_VALUE_CHARS} printable characters")
    if len({name for name, _ in items}) != len(items):
        raise FrameError("fingerprint names an item twice")
    return Fingerprint(items)


def pack_layout(layout: CacheLayout) -> pb.CacheLayout:
    return pb.CacheLayout(
        num_layers=layout.num_layers,
        components=[_pack_component(one) for one in layout.components],
        num_draft_layers=layout.num_draft_layers,
    )


def unpack_layout(message: pb.CacheLayout) -> CacheLayout:
    """Ranks of an instance send the same layout: it is built and checked once."""
    return _layout_of(message.SerializeToString(deterministic=True))


@lru_cache(maxsize=64)
def _layout_of(data: bytes) -> CacheLayout:
    message = pb.CacheLayout.FromString(data)
    bounded("layout.components", len(message.components), MAX_COMPONENTS)
    for what, count in (("num_layers", message.num_layers), ("num_draft_layers", message.num_draft_layers)):
        if count > MAX_LAYERS:
            raise FrameError(f"layout.{what} is {count}; at most {MAX_LAYERS}")
    rows = sum(one.page_size * field.num_heads for one in message.components for field in one.fields)
    if rows > MAX_ROWS:
        raise FrameError(f"layout has {rows} token rows to a page over all fields and heads; at most {MAX_ROWS}")
    with reading("layout"):
        components = tuple(_unpack_component(one) for one in message.components)
        return CacheLayout(message.num_layers, components, message.num_draft_layers)


def _pack_component(one: Component) -> pb.Component:
    return pb.Component(
        name=one.name,
        dtype=one.dtype,
        page_size=one.page_size,
        page_bytes=one.page_bytes,
        layers=one.layers,
        fields=[
            pb.Field(
                name=field.name,
                offset=field.offset,
                bytes_per_token=field.bytes_per_token,
                token_stride=field.token_stride,
                num_heads=field.num_heads,
                head_stride=field.head_stride,
            )
            for field in one.fields
        ],
        page_group=one.page_group,
        total_heads=one.total_heads,
    )


def _unpack_component(message: pb.Component) -> Component:
    check_name("component", message.name)
    check_name(f"dtype of component {message.name!r}", message.dtype)
    check_name(f"page group of component {message.name!r}", message.page_group)
    bounded(f"fields of component {message.name!r}", len(message.fields), MAX_FIELDS)
    bounded(f"layers of component {message.name!r}", len(message.layers), MAX_LAYERS)
    fields = []
    for one in message.fields:
        check_name(f"field of component {message.name!r}", one.name)
        if max(one.offset, one.bytes_per_token, one.token_stride, one.head_stride) > message.page_bytes:
            raise FrameError(f"field {one.name!r} of component {message.name!r} lies outside its page")
        fields.append(
            Field(one.name, one.offset, one.bytes_per_token, one.token_stride, one.num_heads, one.head_stride)
        )
    return Component(
        message.name,
        message.dtype,
        message.page_size,
        message.page_bytes,
        tuple(message.layers),
        tuple(fields),
        message.page_group,
        message.total_heads,
    )


def pack_sizes(sizes: ParallelSizes) -> pb.ParallelSizes:
    return pb.ParallelSizes(dp=sizes.dp, pp=sizes.pp, cp=sizes.cp, tp=sizes.tp)


def unpack_sizes(message: pb.ParallelSizes) -> ParallelSizes:
    with reading("sizes"):
        return ParallelSizes(message.dp, message.pp, message.cp, message.tp)


def pack_rank(rank: RankCoordinates) -> pb.RankCoordinates:
    return pb.RankCoordinates(dp=rank.dp, pp=rank.pp, cp=rank.cp, tp=rank.tp)


def unpack_rank(message: pb.RankCoordinates) -> RankCoordinates:
    return RankCoordinates(message.dp, message.pp, message.cp, message.tp)


def pack_kinds(kinds: Mapping[str, PlanKind]) -> list[pb.ComponentPlan]:
    return [pb.ComponentPlan(component=name, kind=_PLAN_KINDS[kind]) for name, kind in kinds.items()]


def unpack_kinds(messages: Sequence[pb.ComponentPlan]) -> dict[str, PlanKind]:
    bounded("kinds", len(messages), MAX_COMPONENTS)
    kinds: dict[str, PlanKind] = {}
    for one in messages:
        kind = _PLAN_KINDS_READ.get(one.kind)
        if kind is None:
            raise FrameError(f"kinds: component {clip(one.component, 64)!r} has unknown plan kind {one.kind}")
        if one.component in kinds:
            raise FrameError(f"kinds: component {clip(one.component, 64)!r} is named twice")
        kinds[one.component] = kind
    return kinds


def pack_layers(layers: OwnedLayers) -> list[pb.LayerSet]:
    return [pb.LayerSet(component=name, layers=ids) for name, ids in layers.items()]


def unpack_layers(messages: Sequence[pb.LayerSet], what: str = "owned") -> dict[str, tuple[int, ...]]:
    """Component -> layer ids as sent; whoever builds a value of them checks their order and that they exist."""
    bounded(what, len(messages), MAX_COMPONENTS)
    layers: dict[str, tuple[int, ...]] = {}
    for one in messages:
        with reading(what):
            check_name("component", one.component)
        bounded(f"{what} layers of {one.component!r}", len(one.layers), MAX_LAYERS)
        if one.component in layers:
            raise FrameError(f"{what}: component {one.component!r} is named twice")
        layers[one.component] = tuple(one.layers)
    return layers


def pack_memory(memory: MemoryKind) -> pb.MemoryKind:
    return _MEMORY_KINDS[memory]


def unpack_memory(where: str, sent: int) -> MemoryKind:
    """Raises `FrameError` for a kind that is not known here."""
    memory = _MEMORY_KINDS_READ.get(sent)
    if memory is None:
        raise FrameError(f"{where} has unknown memory kind {sent}")
    return memory


def pack_regions(regions: Iterable[Region]) -> list[pb.RegionSet]:
    """Regions that differ in layer and base address only share one set: 10 bytes a layer, whatever the page count."""
    sets: dict[tuple[object, ...], pb.RegionSet] = {}
    for one in regions:
        alike = (one.component, one.page_stride, one.page_bytes, one.num_pages, one.memory, one.device)
        if alike not in sets:
            sets[alike] = pb.RegionSet(
                component=one.component,
                page_stride=one.page_stride,
                page_bytes=one.page_bytes,
                num_pages=one.num_pages,
                memory=_MEMORY_KINDS[one.memory],
                device=one.device,
            )
        sets[alike].layers.append(one.layer)
        sets[alike].base_addresses.append(one.base_address)
    return list(sets.values())


def unpack_regions(messages: Sequence[pb.RegionSet]) -> tuple[Region, ...]:
    """Raises `FrameError` naming the set; a page count costs nothing here."""
    bounded("regions", len(messages), MAX_COMPONENTS * MAX_LAYERS)
    regions = []
    for index, one in enumerate(messages):
        where = f"regions[{index}] of {clip(one.component, 64)!r}"
        memory = unpack_memory(where, one.memory)
        if len(one.layers) != len(one.base_addresses):
            raise FrameError(f"{where} has {len(one.layers)} layers and {len(one.base_addresses)} base addresses")
        with reading(where):
            check_name("component", one.component)
            shape = (one.page_stride, one.page_bytes, one.num_pages, memory, one.device)
            regions += [
                Region(one.component, layer, base, *shape)
                for layer, base in zip(one.layers, one.base_addresses, strict=True)
            ]
    return tuple(regions)
