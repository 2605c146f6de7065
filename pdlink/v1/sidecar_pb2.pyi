from pdlink.v1 import common_pb2 as _common_pb2
from pdlink.v1 import control_pb2 as _control_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenRequest(_message.Message):
    __slots__ = ("protocol",)
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    def __init__(self, protocol: _Optional[int] = ...) -> None: ...

class OpenResponse(_message.Message):
    __slots__ = ("opened", "error")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    error: _common_pb2.ErrorDetail
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("socket", "lifeline", "backends", "handover")
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    LIFELINE_FIELD_NUMBER: _ClassVar[int]
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_FIELD_NUMBER: _ClassVar[int]
    socket: str
    lifeline: str
    backends: _containers.RepeatedScalarFieldContainer[str]
    handover: str
    def __init__(self, socket: _Optional[str] = ..., lifeline: _Optional[str] = ..., backends: _Optional[_Iterable[str]] = ..., handover: _Optional[str] = ...) -> None: ...

class StandRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StandResponse(_message.Message):
    __slots__ = ("health", "readiness")
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    READINESS_FIELD_NUMBER: _ClassVar[int]
    health: Standing
    readiness: Standing
    def __init__(self, health: _Optional[_Union[Standing, _Mapping]] = ..., readiness: _Optional[_Union[Standing, _Mapping]] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("ok", "reasons", "parts")
    class PartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    OK_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    reasons: _containers.RepeatedScalarFieldContainer[str]
    parts: _containers.ScalarMap[str, str]
    def __init__(self, ok: _Optional[bool] = ..., reasons: _Optional[_Iterable[str]] = ..., parts: _Optional[_Mapping[str, str]] = ...) -> None: ...

class EngineMessage(_message.Message):
    __slots__ = ("call", "attach_prefill", "attach_decode", "detach", "await_registered", "open", "publish", "withdraw", "abort_sender", "receive", "abort_receive", "ask_waits", "explain", "goodbye")
    CALL_FIELD_NUMBER: _ClassVar[int]
    ATTACH_PREFILL_FIELD_NUMBER: _ClassVar[int]
    ATTACH_DECODE_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    AWAIT_REGISTERED_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    WITHDRAW_FIELD_NUMBER: _ClassVar[int]
    ABORT_SENDER_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_FIELD_NUMBER: _ClassVar[int]
    ABORT_RECEIVE_FIELD_NUMBER: _ClassVar[int]
    ASK_WAITS_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    call: int
    attach_prefill: AttachPrefill
    attach_decode: AttachDecode
    detach: Detach
    await_registered: AwaitRegistered
    open: OpenSender
    publish: PublishPages
    withdraw: WithdrawPages
    abort_sender: AbortSender
    receive: Receive
    abort_receive: AbortReceive
    ask_waits: AskWaits
    explain: Explain
    goodbye: Goodbye
    def __init__(self, call: _Optional[int] = ..., attach_prefill: _Optional[_Union[AttachPrefill, _Mapping]] = ..., attach_decode: _Optional[_Union[AttachDecode, _Mapping]] = ..., detach: _Optional[_Union[Detach, _Mapping]] = ..., await_registered: _Optional[_Union[AwaitRegistered, _Mapping]] = ..., open: _Optional[_Union[OpenSender, _Mapping]] = ..., publish: _Optional[_Union[PublishPages, _Mapping]] = ..., withdraw: _Optional[_Union[WithdrawPages, _Mapping]] = ..., abort_sender: _Optional[_Union[AbortSender, _Mapping]] = ..., receive: _Optional[_Union[Receive, _Mapping]] = ..., abort_receive: _Optional[_Union[AbortReceive, _Mapping]] = ..., ask_waits: _Optional[_Union[AskWaits, _Mapping]] = ..., explain: _Optional[_Union[Explain, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SidecarMessage(_message.Message):
    __slots__ = ("answer", "sender", "receiver")
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    answer: Answer
    sender: SenderUpdate
    receiver: ReceiverUpdate
    def __init__(self, answer: _Optional[_Union[Answer, _Mapping]] = ..., sender: _Optional[_Union[SenderUpdate, _Mapping]] = ..., receiver: _Optional[_Union[ReceiverUpdate, _Mapping]] = ...) -> None: ...

class EngineSegment(_message.Message):
    __slots__ = ("name", "nbytes", "base_address")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    nbytes: int
    base_address: int
    def __init__(self, name: _Optional[str] = ..., nbytes: _Optional[int] = ..., base_address: _Optional[int] = ...) -> None: ...

class DeviceBlock(_message.Message):
    __slots__ = ("gpu_uuid", "nbytes", "base_address", "ipc_handle")
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    IPC_HANDLE_FIELD_NUMBER: _ClassVar[int]
    gpu_uuid: bytes
    nbytes: int
    base_address: int
    ipc_handle: bytes
    def __init__(self, gpu_uuid: _Optional[bytes] = ..., nbytes: _Optional[int] = ..., base_address: _Optional[int] = ..., ipc_handle: _Optional[bytes] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("engine_pid", "segments", "regions", "blocks", "ticket", "events")
    ENGINE_PID_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    engine_pid: int
    segments: _containers.RepeatedCompositeFieldContainer[EngineSegment]
    regions: _containers.RepeatedCompositeFieldContainer[_common_pb2.RegionSet]
    blocks: _containers.RepeatedCompositeFieldContainer[DeviceBlock]
    ticket: bytes
    events: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, engine_pid: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[EngineSegment, _Mapping]]] = ..., regions: _Optional[_Iterable[_Union[_common_pb2.RegionSet, _Mapping]]] = ..., blocks: _Optional[_Iterable[_Union[DeviceBlock, _Mapping]]] = ..., ticket: _Optional[bytes] = ..., events: _Optional[_Iterable[bytes]] = ...) -> None: ...

class AttachPrefill(_message.Message):
    __slots__ = ("worker", "instance", "protocol", "layout", "sizes", "rank", "kinds", "owned", "pool", "bootstraps")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    OWNED_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAPS_FIELD_NUMBER: _ClassVar[int]
    worker: int
    instance: str
    protocol: _common_pb2.ProtocolRange
    layout: _common_pb2.CacheLayout
    sizes: _common_pb2.ParallelSizes
    rank: _common_pb2.RankCoordinates
    kinds: _containers.RepeatedCompositeFieldContainer[_common_pb2.ComponentPlan]
    owned: _containers.RepeatedCompositeFieldContainer[_common_pb2.LayerSet]
    pool: Pool
    bootstraps: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker: _Optional[int] = ..., instance: _Optional[str] = ..., protocol: _Optional[_Union[_common_pb2.ProtocolRange, _Mapping]] = ..., layout: _Optional[_Union[_common_pb2.CacheLayout, _Mapping]] = ..., sizes: _Optional[_Union[_common_pb2.ParallelSizes, _Mapping]] = ..., rank: _Optional[_Union[_common_pb2.RankCoordinates, _Mapping]] = ..., kinds: _Optional[_Iterable[_Union[_common_pb2.ComponentPlan, _Mapping]]] = ..., owned: _Optional[_Iterable[_Union[_common_pb2.LayerSet, _Mapping]]] = ..., pool: _Optional[_Union[Pool, _Mapping]] = ..., bootstraps: _Optional[_Iterable[str]] = ...) -> None: ...

class AttachDecode(_message.Message):
    __slots__ = ("worker", "instance", "protocol", "layout", "pool", "place")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    worker: int
    instance: str
    protocol: _common_pb2.ProtocolRange
    layout: _common_pb2.CacheLayout
    pool: Pool
    place: DecodePlace
    def __init__(self, worker: _Optional[int] = ..., instance: _Optional[str] = ..., protocol: _Optional[_Union[_common_pb2.ProtocolRange, _Mapping]] = ..., layout: _Optional[_Union[_common_pb2.CacheLayout, _Mapping]] = ..., pool: _Optional[_Union[Pool, _Mapping]] = ..., place: _Optional[_Union[DecodePlace, _Mapping]] = ...) -> None: ...

class DecodePlace(_message.Message):
    __slots__ = ("dp_size", "pp_size", "tp_size", "dcp", "dp", "pp", "tp", "has_owned", "owned")
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    DCP_FIELD_NUMBER: _ClassVar[int]
    DP_FIELD_NUMBER: _ClassVar[int]
    PP_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    HAS_OWNED_FIELD_NUMBER: _ClassVar[int]
    OWNED_FIELD_NUMBER: _ClassVar[int]
    dp_size: int
    pp_size: int
    tp_size: int
    dcp: int
    dp: int
    pp: int
    tp: int
    has_owned: bool
    owned: _containers.RepeatedCompositeFieldContainer[_common_pb2.LayerSet]
    def __init__(self, dp_size: _Optional[int] = ..., pp_size: _Optional[int] = ..., tp_size: _Optional[int] = ..., dcp: _Optional[int] = ..., dp: _Optional[int] = ..., pp: _Optional[int] = ..., tp: _Optional[int] = ..., has_owned: _Optional[bool] = ..., owned: _Optional[_Iterable[_Union[_common_pb2.LayerSet, _Mapping]]] = ...) -> None: ...

class Detach(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: int
    def __init__(self, worker: _Optional[int] = ...) -> None: ...

class AwaitRegistered(_message.Message):
    __slots__ = ("worker", "timeout_s")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    worker: int
    timeout_s: float
    def __init__(self, worker: _Optional[int] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class OpenSender(_message.Message):
    __slots__ = ("worker", "sender", "transfer_id")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    worker: int
    sender: int
    transfer_id: str
    def __init__(self, worker: _Optional[int] = ..., sender: _Optional[int] = ..., transfer_id: _Optional[str] = ...) -> None: ...

class PublishPages(_message.Message):
    __slots__ = ("sender", "group", "page_ids", "start_page", "layers", "last", "aux", "worker", "event")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    START_PAGE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    AUX_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    sender: int
    group: str
    page_ids: bytes
    start_page: int
    layers: LayerChoice
    last: bool
    aux: bytes
    worker: int
    event: int
    def __init__(self, sender: _Optional[int] = ..., group: _Optional[str] = ..., page_ids: _Optional[bytes] = ..., start_page: _Optional[int] = ..., layers: _Optional[_Union[LayerChoice, _Mapping]] = ..., last: _Optional[bool] = ..., aux: _Optional[bytes] = ..., worker: _Optional[int] = ..., event: _Optional[int] = ...) -> None: ...

class LayerChoice(_message.Message):
    __slots__ = ("sets",)
    SETS_FIELD_NUMBER: _ClassVar[int]
    sets: _containers.RepeatedCompositeFieldContainer[_common_pb2.LayerSet]
    def __init__(self, sets: _Optional[_Iterable[_Union[_common_pb2.LayerSet, _Mapping]]] = ...) -> None: ...

class WithdrawPages(_message.Message):
    __slots__ = ("sender", "group", "page_ids")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    sender: int
    group: str
    page_ids: bytes
    def __init__(self, sender: _Optional[int] = ..., group: _Optional[str] = ..., page_ids: _Optional[bytes] = ...) -> None: ...

class AbortSender(_message.Message):
    __slots__ = ("sender", "text")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    sender: int
    text: str
    def __init__(self, sender: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class GroupPages(_message.Message):
    __slots__ = ("group", "page_ids")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    group: str
    page_ids: bytes
    def __init__(self, group: _Optional[str] = ..., page_ids: _Optional[bytes] = ...) -> None: ...

class PrefillInstanceName(_message.Message):
    __slots__ = ("name", "bootstraps")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAPS_FIELD_NUMBER: _ClassVar[int]
    name: str
    bootstraps: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., bootstraps: _Optional[_Iterable[str]] = ...) -> None: ...

class Receive(_message.Message):
    __slots__ = ("worker", "receiver", "transfer_id", "prefill", "pages", "num_tokens", "prefix_tokens", "readers", "dp", "expect_aux", "trace_parent")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    DP_FIELD_NUMBER: _ClassVar[int]
    EXPECT_AUX_FIELD_NUMBER: _ClassVar[int]
    TRACE_PARENT_FIELD_NUMBER: _ClassVar[int]
    worker: int
    receiver: int
    transfer_id: str
    prefill: PrefillInstanceName
    pages: _containers.RepeatedCompositeFieldContainer[GroupPages]
    num_tokens: int
    prefix_tokens: int
    readers: _common_pb2.ReaderSet
    dp: int
    expect_aux: bool
    trace_parent: str
    def __init__(self, worker: _Optional[int] = ..., receiver: _Optional[int] = ..., transfer_id: _Optional[str] = ..., prefill: _Optional[_Union[PrefillInstanceName, _Mapping]] = ..., pages: _Optional[_Iterable[_Union[GroupPages, _Mapping]]] = ..., num_tokens: _Optional[int] = ..., prefix_tokens: _Optional[int] = ..., readers: _Optional[_Union[_common_pb2.ReaderSet, _Mapping]] = ..., dp: _Optional[int] = ..., expect_aux: _Optional[bool] = ..., trace_parent: _Optional[str] = ...) -> None: ...

class AbortReceive(_message.Message):
    __slots__ = ("receiver", "text")
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    receiver: int
    text: str
    def __init__(self, receiver: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class AskWaits(_message.Message):
    __slots__ = ("receiver",)
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    receiver: int
    def __init__(self, receiver: _Optional[int] = ...) -> None: ...

class Explain(_message.Message):
    __slots__ = ("worker", "prefill")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    worker: int
    prefill: PrefillInstanceName
    def __init__(self, worker: _Optional[int] = ..., prefill: _Optional[_Union[PrefillInstanceName, _Mapping]] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("call", "error", "attempt", "names", "texts", "quiet")
    class TextsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CALL_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    QUIET_FIELD_NUMBER: _ClassVar[int]
    call: int
    error: _common_pb2.ErrorDetail
    attempt: int
    names: _containers.RepeatedScalarFieldContainer[str]
    texts: _containers.ScalarMap[str, str]
    quiet: bool
    def __init__(self, call: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ..., attempt: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ..., texts: _Optional[_Mapping[str, str]] = ..., quiet: _Optional[bool] = ...) -> None: ...

class SenderUpdate(_message.Message):
    __slots__ = ("sender", "state", "failure", "has_first_pages", "first_pages")
    class FirstPagesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SENDER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    HAS_FIRST_PAGES_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGES_FIELD_NUMBER: _ClassVar[int]
    sender: int
    state: str
    failure: _control_pb2.Cause
    has_first_pages: bool
    first_pages: _containers.ScalarMap[str, int]
    def __init__(self, sender: _Optional[int] = ..., state: _Optional[str] = ..., failure: _Optional[_Union[_control_pb2.Cause, _Mapping]] = ..., has_first_pages: _Optional[bool] = ..., first_pages: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ReceiverUpdate(_message.Message):
    __slots__ = ("receiver", "state", "failure", "result")
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    receiver: int
    state: str
    failure: _control_pb2.Cause
    result: Received
    def __init__(self, receiver: _Optional[int] = ..., state: _Optional[str] = ..., failure: _Optional[_Union[_control_pb2.Cause, _Mapping]] = ..., result: _Optional[_Union[Received, _Mapping]] = ...) -> None: ...

class Received(_message.Message):
    __slots__ = ("aux", "owners", "num_descriptors", "elapsed_s")
    AUX_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    NUM_DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    aux: bytes
    owners: _containers.RepeatedCompositeFieldContainer[OwnerShare]
    num_descriptors: int
    elapsed_s: float
    def __init__(self, aux: _Optional[bytes] = ..., owners: _Optional[_Iterable[_Union[OwnerShare, _Mapping]]] = ..., num_descriptors: _Optional[int] = ..., elapsed_s: _Optional[float] = ...) -> None: ...

class OwnerShare(_message.Message):
    __slots__ = ("worker_id", "num_bytes", "backend", "ways")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    WAYS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    num_bytes: int
    backend: str
    ways: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., num_bytes: _Optional[int] = ..., backend: _Optional[str] = ..., ways: _Optional[_Iterable[str]] = ...) -> None: ...
