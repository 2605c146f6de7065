from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PlanKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLAN_KIND_UNSPECIFIED: _ClassVar[PlanKind]
    PLAN_KIND_SPLIT: _ClassVar[PlanKind]
    PLAN_KIND_REPLICATED: _ClassVar[PlanKind]

class MemoryKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMORY_KIND_UNSPECIFIED: _ClassVar[MemoryKind]
    MEMORY_KIND_HOST: _ClassVar[MemoryKind]
    MEMORY_KIND_CUDA: _ClassVar[MemoryKind]
PLAN_KIND_UNSPECIFIED: PlanKind
PLAN_KIND_SPLIT: PlanKind
PLAN_KIND_REPLICATED: PlanKind
MEMORY_KIND_UNSPECIFIED: MemoryKind
MEMORY_KIND_HOST: MemoryKind
MEMORY_KIND_CUDA: MemoryKind

class ProtocolRange(_message.Message):
    __slots__ = ("least", "greatest")
    LEAST_FIELD_NUMBER: _ClassVar[int]
    GREATEST_FIELD_NUMBER: _ClassVar[int]
    least: int
    greatest: int
    def __init__(self, least: _Optional[int] = ..., greatest: _Optional[int] = ...) -> None: ...

class Field(_message.Message):
    __slots__ = ("name", "offset", "bytes_per_token", "token_stride", "num_heads", "head_stride")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_STRIDE_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_STRIDE_FIELD_NUMBER: _ClassVar[int]
    name: str
    offset: int
    bytes_per_token: int
    token_stride: int
    num_heads: int
    head_stride: int
    def __init__(self, name: _Optional[str] = ..., offset: _Optional[int] = ..., bytes_per_token: _Optional[int] = ..., token_stride: _Optional[int] = ..., num_heads: _Optional[int] = ..., head_stride: _Optional[int] = ...) -> None: ...

class Component(_message.Message):
    __slots__ = ("name", "dtype", "page_size", "page_bytes", "layers", "fields", "page_group", "total_heads")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    PAGE_GROUP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_HEADS_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    page_size: int
    page_bytes: int
    layers: _containers.RepeatedScalarFieldContainer[int]
    fields: _containers.RepeatedCompositeFieldContainer[Field]
    page_group: str
    total_heads: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., page_size: _Optional[int] = ..., page_bytes: _Optional[int] = ..., layers: _Optional[_Iterable[int]] = ..., fields: _Optional[_Iterable[_Union[Field, _Mapping]]] = ..., page_group: _Optional[str] = ..., total_heads: _Optional[int] = ...) -> None: ...

class CacheLayout(_message.Message):
    __slots__ = ("num_layers", "components", "num_draft_layers")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    components: _containers.RepeatedCompositeFieldContainer[Component]
    num_draft_layers: int
    def __init__(self, num_layers: _Optional[int] = ..., components: _Optional[_Iterable[_Union[Component, _Mapping]]] = ..., num_draft_layers: _Optional[int] = ...) -> None: ...

class LayerSet(_message.Message):
    __slots__ = ("component", "layers")
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    component: str
    layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, component: _Optional[str] = ..., layers: _Optional[_Iterable[int]] = ...) -> None: ...

class RankCoordinates(_message.Message):
    __slots__ = ("dp", "pp", "cp", "tp")
    DP_FIELD_NUMBER: _ClassVar[int]
    PP_FIELD_NUMBER: _ClassVar[int]
    CP_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    dp: int
    pp: int
    cp: int
    tp: int
    def __init__(self, dp: _Optional[int] = ..., pp: _Optional[int] = ..., cp: _Optional[int] = ..., tp: _Optional[int] = ...) -> None: ...

class ParallelSizes(_message.Message):
    __slots__ = ("dp", "pp", "cp", "tp")
    DP_FIELD_NUMBER: _ClassVar[int]
    PP_FIELD_NUMBER: _ClassVar[int]
    CP_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    dp: int
    pp: int
    cp: int
    tp: int
    def __init__(self, dp: _Optional[int] = ..., pp: _Optional[int] = ..., cp: _Optional[int] = ..., tp: _Optional[int] = ...) -> None: ...

class ComponentPlan(_message.Message):
    __slots__ = ("component", "kind")
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    component: str
    kind: PlanKind
    def __init__(self, component: _Optional[str] = ..., kind: _Optional[_Union[PlanKind, str]] = ...) -> None: ...

class RegionSet(_message.Message):
    __slots__ = ("component", "page_stride", "page_bytes", "num_pages", "memory", "device", "layers", "base_addresses")
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    PAGE_STRIDE_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    BASE_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    component: str
    page_stride: int
    page_bytes: int
    num_pages: int
    memory: MemoryKind
    device: int
    layers: _containers.RepeatedScalarFieldContainer[int]
    base_addresses: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, component: _Optional[str] = ..., page_stride: _Optional[int] = ..., page_bytes: _Optional[int] = ..., num_pages: _Optional[int] = ..., memory: _Optional[_Union[MemoryKind, str]] = ..., device: _Optional[int] = ..., layers: _Optional[_Iterable[int]] = ..., base_addresses: _Optional[_Iterable[int]] = ...) -> None: ...

class ReaderSet(_message.Message):
    __slots__ = ("decode_instance", "reader_index", "num_readers")
    DECODE_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    READER_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_READERS_FIELD_NUMBER: _ClassVar[int]
    decode_instance: str
    reader_index: int
    num_readers: int
    def __init__(self, decode_instance: _Optional[str] = ..., reader_index: _Optional[int] = ..., num_readers: _Optional[int] = ...) -> None: ...

class FingerprintItem(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Fingerprint(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[FingerprintItem]
    def __init__(self, items: _Optional[_Iterable[_Union[FingerprintItem, _Mapping]]] = ...) -> None: ...

class Side(_message.Message):
    __slots__ = ("protocol", "fingerprint")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    protocol: ProtocolRange
    fingerprint: Fingerprint
    def __init__(self, protocol: _Optional[_Union[ProtocolRange, _Mapping]] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ...) -> None: ...

class Mismatch(_message.Message):
    __slots__ = ("field", "prefill", "decode", "fix")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    FIX_FIELD_NUMBER: _ClassVar[int]
    field: str
    prefill: str
    decode: str
    fix: str
    def __init__(self, field: _Optional[str] = ..., prefill: _Optional[str] = ..., decode: _Optional[str] = ..., fix: _Optional[str] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("kind", "text", "mismatches", "peer")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MISMATCHES_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    mismatches: _containers.RepeatedCompositeFieldContainer[Mismatch]
    peer: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ..., mismatches: _Optional[_Iterable[_Union[Mismatch, _Mapping]]] = ..., peer: _Optional[str] = ...) -> None: ...
