from pdlink.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LeaseStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_STATUS_UNSPECIFIED: _ClassVar[LeaseStatus]
    LEASE_STATUS_RENEWED: _ClassVar[LeaseStatus]
    LEASE_STATUS_UNKNOWN: _ClassVar[LeaseStatus]
    LEASE_STATUS_REPLACED: _ClassVar[LeaseStatus]
    LEASE_STATUS_NOT_OWNER: _ClassVar[LeaseStatus]
LEASE_STATUS_UNSPECIFIED: LeaseStatus
LEASE_STATUS_RENEWED: LeaseStatus
LEASE_STATUS_UNKNOWN: LeaseStatus
LEASE_STATUS_REPLACED: LeaseStatus
LEASE_STATUS_NOT_OWNER: LeaseStatus

class Transport(_message.Message):
    __slots__ = ("name", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    data: bytes
    def __init__(self, name: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class StagingArea(_message.Message):
    __slots__ = ("base_address", "slot_bytes", "num_slots", "backends", "memory", "device")
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    base_address: int
    slot_bytes: int
    num_slots: int
    backends: _containers.RepeatedScalarFieldContainer[str]
    memory: _common_pb2.MemoryKind
    device: int
    def __init__(self, base_address: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., num_slots: _Optional[int] = ..., backends: _Optional[_Iterable[str]] = ..., memory: _Optional[_Union[_common_pb2.MemoryKind, str]] = ..., device: _Optional[int] = ...) -> None: ...

class ControlKeys(_message.Message):
    __slots__ = ("server_public", "client_public", "client_secret")
    SERVER_PUBLIC_FIELD_NUMBER: _ClassVar[int]
    CLIENT_PUBLIC_FIELD_NUMBER: _ClassVar[int]
    CLIENT_SECRET_FIELD_NUMBER: _ClassVar[int]
    server_public: bytes
    client_public: bytes
    client_secret: bytes
    def __init__(self, server_public: _Optional[bytes] = ..., client_public: _Optional[bytes] = ..., client_secret: _Optional[bytes] = ...) -> None: ...

class RankInfo(_message.Message):
    __slots__ = ("worker_id", "incarnation", "coordinates", "owned", "regions", "control_endpoint", "transports", "staging", "control_keys", "staged_only")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    COORDINATES_FIELD_NUMBER: _ClassVar[int]
    OWNED_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    CONTROL_KEYS_FIELD_NUMBER: _ClassVar[int]
    STAGED_ONLY_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    coordinates: _common_pb2.RankCoordinates
    owned: _containers.RepeatedCompositeFieldContainer[_common_pb2.LayerSet]
    regions: _containers.RepeatedCompositeFieldContainer[_common_pb2.RegionSet]
    control_endpoint: str
    transports: _containers.RepeatedCompositeFieldContainer[Transport]
    staging: StagingArea
    control_keys: ControlKeys
    staged_only: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., coordinates: _Optional[_Union[_common_pb2.RankCoordinates, _Mapping]] = ..., owned: _Optional[_Iterable[_Union[_common_pb2.LayerSet, _Mapping]]] = ..., regions: _Optional[_Iterable[_Union[_common_pb2.RegionSet, _Mapping]]] = ..., control_endpoint: _Optional[str] = ..., transports: _Optional[_Iterable[_Union[Transport, _Mapping]]] = ..., staging: _Optional[_Union[StagingArea, _Mapping]] = ..., control_keys: _Optional[_Union[ControlKeys, _Mapping]] = ..., staged_only: _Optional[_Iterable[str]] = ...) -> None: ...

class Registration(_message.Message):
    __slots__ = ("instance", "protocol", "layout", "sizes", "kinds", "rank")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    instance: str
    protocol: _common_pb2.ProtocolRange
    layout: _common_pb2.CacheLayout
    sizes: _common_pb2.ParallelSizes
    kinds: _containers.RepeatedCompositeFieldContainer[_common_pb2.ComponentPlan]
    rank: RankInfo
    def __init__(self, instance: _Optional[str] = ..., protocol: _Optional[_Union[_common_pb2.ProtocolRange, _Mapping]] = ..., layout: _Optional[_Union[_common_pb2.CacheLayout, _Mapping]] = ..., sizes: _Optional[_Union[_common_pb2.ParallelSizes, _Mapping]] = ..., kinds: _Optional[_Iterable[_Union[_common_pb2.ComponentPlan, _Mapping]]] = ..., rank: _Optional[_Union[RankInfo, _Mapping]] = ...) -> None: ...

class PrefillServerInfo(_message.Message):
    __slots__ = ("instance", "protocol", "fingerprint", "layout", "sizes", "kinds", "ranks", "version", "tp_layouts")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TP_LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    instance: str
    protocol: _common_pb2.ProtocolRange
    fingerprint: _common_pb2.Fingerprint
    layout: _common_pb2.CacheLayout
    sizes: _common_pb2.ParallelSizes
    kinds: _containers.RepeatedCompositeFieldContainer[_common_pb2.ComponentPlan]
    ranks: _containers.RepeatedCompositeFieldContainer[RankInfo]
    version: int
    tp_layouts: _containers.RepeatedCompositeFieldContainer[_common_pb2.CacheLayout]
    def __init__(self, instance: _Optional[str] = ..., protocol: _Optional[_Union[_common_pb2.ProtocolRange, _Mapping]] = ..., fingerprint: _Optional[_Union[_common_pb2.Fingerprint, _Mapping]] = ..., layout: _Optional[_Union[_common_pb2.CacheLayout, _Mapping]] = ..., sizes: _Optional[_Union[_common_pb2.ParallelSizes, _Mapping]] = ..., kinds: _Optional[_Iterable[_Union[_common_pb2.ComponentPlan, _Mapping]]] = ..., ranks: _Optional[_Iterable[_Union[RankInfo, _Mapping]]] = ..., version: _Optional[int] = ..., tp_layouts: _Optional[_Iterable[_Union[_common_pb2.CacheLayout, _Mapping]]] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("registration", "owner_key")
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    OWNER_KEY_FIELD_NUMBER: _ClassVar[int]
    registration: Registration
    owner_key: bytes
    def __init__(self, registration: _Optional[_Union[Registration, _Mapping]] = ..., owner_key: _Optional[bytes] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("lease_s",)
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    def __init__(self, lease_s: _Optional[float] = ...) -> None: ...

class WorkerKey(_message.Message):
    __slots__ = ("instance", "worker_id", "incarnation", "owner_key")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    OWNER_KEY_FIELD_NUMBER: _ClassVar[int]
    instance: str
    worker_id: str
    incarnation: int
    owner_key: bytes
    def __init__(self, instance: _Optional[str] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., owner_key: _Optional[bytes] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerKey]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerKey, _Mapping]]] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("statuses", "lease_s")
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedScalarFieldContainer[LeaseStatus]
    lease_s: float
    def __init__(self, statuses: _Optional[_Iterable[_Union[LeaseStatus, str]]] = ..., lease_s: _Optional[float] = ...) -> None: ...

class WithdrawRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerKey
    def __init__(self, worker: _Optional[_Union[WorkerKey, _Mapping]] = ...) -> None: ...

class WithdrawResponse(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: bool
    def __init__(self, removed: _Optional[bool] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("worker_id", "incarnation", "coordinates", "control_endpoint", "control_keys")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    COORDINATES_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    CONTROL_KEYS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    coordinates: _common_pb2.RankCoordinates
    control_endpoint: str
    control_keys: ControlKeys
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., coordinates: _Optional[_Union[_common_pb2.RankCoordinates, _Mapping]] = ..., control_endpoint: _Optional[str] = ..., control_keys: _Optional[_Union[ControlKeys, _Mapping]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("mismatches", "endpoints")
    MISMATCHES_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    mismatches: _containers.RepeatedCompositeFieldContainer[_common_pb2.Mismatch]
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    def __init__(self, mismatches: _Optional[_Iterable[_Union[_common_pb2.Mismatch, _Mapping]]] = ..., endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ...) -> None: ...

class ResolveRequest(_message.Message):
    __slots__ = ("instance", "decode", "takes_control_keys")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    TAKES_CONTROL_KEYS_FIELD_NUMBER: _ClassVar[int]
    instance: str
    decode: _common_pb2.Side
    takes_control_keys: bool
    def __init__(self, instance: _Optional[str] = ..., decode: _Optional[_Union[_common_pb2.Side, _Mapping]] = ..., takes_control_keys: _Optional[bool] = ...) -> None: ...

class ResolveResponse(_message.Message):
    __slots__ = ("info", "refusal")
    INFO_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    info: PrefillServerInfo
    refusal: Refusal
    def __init__(self, info: _Optional[_Union[PrefillServerInfo, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("instance", "decode", "takes_control_keys")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    TAKES_CONTROL_KEYS_FIELD_NUMBER: _ClassVar[int]
    instance: str
    decode: _common_pb2.Side
    takes_control_keys: bool
    def __init__(self, instance: _Optional[str] = ..., decode: _Optional[_Union[_common_pb2.Side, _Mapping]] = ..., takes_control_keys: _Optional[bool] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("info", "refusal", "not_ready")
    INFO_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_FIELD_NUMBER: _ClassVar[int]
    info: PrefillServerInfo
    refusal: Refusal
    not_ready: _common_pb2.ErrorDetail
    def __init__(self, info: _Optional[_Union[PrefillServerInfo, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., not_ready: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...
