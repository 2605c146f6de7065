from pdlink.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LookRequest(_message.Message):
    __slots__ = ("instance",)
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    instance: str
    def __init__(self, instance: _Optional[str] = ...) -> None: ...

class LookResponse(_message.Message):
    __slots__ = ("instances", "lease_s")
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    instances: _containers.RepeatedCompositeFieldContainer[InstanceView]
    lease_s: float
    def __init__(self, instances: _Optional[_Iterable[_Union[InstanceView, _Mapping]]] = ..., lease_s: _Optional[float] = ...) -> None: ...

class InstanceView(_message.Message):
    __slots__ = ("name", "version", "not_ready", "protocol", "layout", "sizes", "kinds", "workers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: int
    not_ready: str
    protocol: _common_pb2.ProtocolRange
    layout: _common_pb2.CacheLayout
    sizes: _common_pb2.ParallelSizes
    kinds: _containers.RepeatedCompositeFieldContainer[_common_pb2.ComponentPlan]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerView]
    def __init__(self, name: _Optional[str] = ..., version: _Optional[int] = ..., not_ready: _Optional[str] = ..., protocol: _Optional[_Union[_common_pb2.ProtocolRange, _Mapping]] = ..., layout: _Optional[_Union[_common_pb2.CacheLayout, _Mapping]] = ..., sizes: _Optional[_Union[_common_pb2.ParallelSizes, _Mapping]] = ..., kinds: _Optional[_Iterable[_Union[_common_pb2.ComponentPlan, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[WorkerView, _Mapping]]] = ...) -> None: ...

class WorkerView(_message.Message):
    __slots__ = ("worker_id", "incarnation", "coordinates", "owned", "control_endpoint", "transports", "num_staging_slots", "staging_slot_bytes", "has_control_keys", "lease_left_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    COORDINATES_FIELD_NUMBER: _ClassVar[int]
    OWNED_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGING_SLOTS_FIELD_NUMBER: _ClassVar[int]
    STAGING_SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    HAS_CONTROL_KEYS_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    coordinates: _common_pb2.RankCoordinates
    owned: _containers.RepeatedCompositeFieldContainer[_common_pb2.LayerSet]
    control_endpoint: str
    transports: _containers.RepeatedScalarFieldContainer[str]
    num_staging_slots: int
    staging_slot_bytes: int
    has_control_keys: bool
    lease_left_s: float
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., coordinates: _Optional[_Union[_common_pb2.RankCoordinates, _Mapping]] = ..., owned: _Optional[_Iterable[_Union[_common_pb2.LayerSet, _Mapping]]] = ..., control_endpoint: _Optional[str] = ..., transports: _Optional[_Iterable[str]] = ..., num_staging_slots: _Optional[int] = ..., staging_slot_bytes: _Optional[int] = ..., has_control_keys: _Optional[bool] = ..., lease_left_s: _Optional[float] = ...) -> None: ...
