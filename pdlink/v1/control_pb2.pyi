from pdlink.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Frame(_message.Message):
    __slots__ = ("version", "transfer_id", "attempt", "subscribe", "subscribed", "refused", "ready", "release", "verdict", "abort", "abort_ack", "failed", "stage", "staged", "credit", "ping", "pong")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    ABORT_ACK_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    version: int
    transfer_id: str
    attempt: int
    subscribe: Subscribe
    subscribed: Subscribed
    refused: Refused
    ready: Ready
    release: Release
    verdict: Verdict
    abort: Abort
    abort_ack: AbortAck
    failed: Failed
    stage: Stage
    staged: Staged
    credit: Credit
    ping: Ping
    pong: Pong
    def __init__(self, version: _Optional[int] = ..., transfer_id: _Optional[str] = ..., attempt: _Optional[int] = ..., subscribe: _Optional[_Union[Subscribe, _Mapping]] = ..., subscribed: _Optional[_Union[Subscribed, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., abort_ack: _Optional[_Union[AbortAck, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., stage: _Optional[_Union[Stage, _Mapping]] = ..., staged: _Optional[_Union[Staged, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ...) -> None: ...

class Cause(_message.Message):
    __slots__ = ("reason", "text", "worker_id", "stage", "fix", "mismatches")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    FIX_FIELD_NUMBER: _ClassVar[int]
    MISMATCHES_FIELD_NUMBER: _ClassVar[int]
    reason: str
    text: str
    worker_id: str
    stage: str
    fix: str
    mismatches: _containers.RepeatedCompositeFieldContainer[_common_pb2.Mismatch]
    def __init__(self, reason: _Optional[str] = ..., text: _Optional[str] = ..., worker_id: _Optional[str] = ..., stage: _Optional[str] = ..., fix: _Optional[str] = ..., mismatches: _Optional[_Iterable[_Union[_common_pb2.Mismatch, _Mapping]]] = ...) -> None: ...

class PageSpan(_message.Message):
    __slots__ = ("group", "first_page", "num_pages")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    group: str
    first_page: int
    num_pages: int
    def __init__(self, group: _Optional[str] = ..., first_page: _Optional[int] = ..., num_pages: _Optional[int] = ...) -> None: ...

class Subscribe(_message.Message):
    __slots__ = ("protocol", "fingerprint_digest", "fingerprint", "readers", "incarnation", "spans", "next_sequence", "backends", "stage_bytes", "stage_pieces", "trace_parent", "parts")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    STAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGE_PIECES_FIELD_NUMBER: _ClassVar[int]
    TRACE_PARENT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    protocol: _common_pb2.ProtocolRange
    fingerprint_digest: bytes
    fingerprint: _common_pb2.Fingerprint
    readers: _common_pb2.ReaderSet
    incarnation: int
    spans: _containers.RepeatedCompositeFieldContainer[PageSpan]
    next_sequence: int
    backends: _containers.RepeatedScalarFieldContainer[str]
    stage_bytes: int
    stage_pieces: int
    trace_parent: str
    parts: _containers.RepeatedCompositeFieldContainer[ReaderPart]
    def __init__(self, protocol: _Optional[_Union[_common_pb2.ProtocolRange, _Mapping]] = ..., fingerprint_digest: _Optional[bytes] = ..., fingerprint: _Optional[_Union[_common_pb2.Fingerprint, _Mapping]] = ..., readers: _Optional[_Union[_common_pb2.ReaderSet, _Mapping]] = ..., incarnation: _Optional[int] = ..., spans: _Optional[_Iterable[_Union[PageSpan, _Mapping]]] = ..., next_sequence: _Optional[int] = ..., backends: _Optional[_Iterable[str]] = ..., stage_bytes: _Optional[int] = ..., stage_pieces: _Optional[int] = ..., trace_parent: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[ReaderPart, _Mapping]]] = ...) -> None: ...

class Subscribed(_message.Message):
    __slots__ = ("incarnation", "next_sequence", "open")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    next_sequence: int
    open: bool
    def __init__(self, incarnation: _Optional[int] = ..., next_sequence: _Optional[int] = ..., open: _Optional[bool] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("cause",)
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    cause: Cause
    def __init__(self, cause: _Optional[_Union[Cause, _Mapping]] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("sequence", "group", "start_page", "page_ids", "layers", "generation", "last", "has_aux", "aux", "digests", "staged_pieces", "digest_kind")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    START_PAGE_FIELD_NUMBER: _ClassVar[int]
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    HAS_AUX_FIELD_NUMBER: _ClassVar[int]
    AUX_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    STAGED_PIECES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_KIND_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    group: str
    start_page: int
    page_ids: bytes
    layers: _containers.RepeatedCompositeFieldContainer[_common_pb2.LayerSet]
    generation: int
    last: bool
    has_aux: bool
    aux: bytes
    digests: bytes
    staged_pieces: int
    digest_kind: str
    def __init__(self, sequence: _Optional[int] = ..., group: _Optional[str] = ..., start_page: _Optional[int] = ..., page_ids: _Optional[bytes] = ..., layers: _Optional[_Iterable[_Union[_common_pb2.LayerSet, _Mapping]]] = ..., generation: _Optional[int] = ..., last: _Optional[bool] = ..., has_aux: _Optional[bool] = ..., aux: _Optional[bytes] = ..., digests: _Optional[bytes] = ..., staged_pieces: _Optional[int] = ..., digest_kind: _Optional[str] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("sequences", "generations", "readers")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    readers: _common_pb2.ReaderSet
    def __init__(self, sequences: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., readers: _Optional[_Union[_common_pb2.ReaderSet, _Mapping]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("unchanged", "cause")
    UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    unchanged: bool
    cause: Cause
    def __init__(self, unchanged: _Optional[bool] = ..., cause: _Optional[_Union[Cause, _Mapping]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("cause", "readers")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    cause: Cause
    readers: _common_pb2.ReaderSet
    def __init__(self, cause: _Optional[_Union[Cause, _Mapping]] = ..., readers: _Optional[_Union[_common_pb2.ReaderSet, _Mapping]] = ...) -> None: ...

class AbortAck(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Failed(_message.Message):
    __slots__ = ("cause",)
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    cause: Cause
    def __init__(self, cause: _Optional[_Union[Cause, _Mapping]] = ...) -> None: ...

class Stage(_message.Message):
    __slots__ = ("ticket", "sequence", "first_page", "num_pages", "layers", "parts")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    sequence: int
    first_page: int
    num_pages: int
    layers: _containers.RepeatedCompositeFieldContainer[_common_pb2.LayerSet]
    parts: _containers.RepeatedCompositeFieldContainer[ReaderPart]
    def __init__(self, ticket: _Optional[int] = ..., sequence: _Optional[int] = ..., first_page: _Optional[int] = ..., num_pages: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[_common_pb2.LayerSet, _Mapping]]] = ..., parts: _Optional[_Iterable[_Union[ReaderPart, _Mapping]]] = ...) -> None: ...

class ReaderPart(_message.Message):
    __slots__ = ("component", "head_index", "head_count", "token_index", "token_count")
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    HEAD_INDEX_FIELD_NUMBER: _ClassVar[int]
    HEAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    component: str
    head_index: int
    head_count: int
    token_index: int
    token_count: int
    def __init__(self, component: _Optional[str] = ..., head_index: _Optional[int] = ..., head_count: _Optional[int] = ..., token_index: _Optional[int] = ..., token_count: _Optional[int] = ...) -> None: ...

class Staged(_message.Message):
    __slots__ = ("ticket", "slot", "offset", "nbytes", "stamp", "generation")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    slot: int
    offset: int
    nbytes: int
    stamp: int
    generation: int
    def __init__(self, ticket: _Optional[int] = ..., slot: _Optional[int] = ..., offset: _Optional[int] = ..., nbytes: _Optional[int] = ..., stamp: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("slots", "stamps")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    STAMPS_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    stamps: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slots: _Optional[_Iterable[int]] = ..., stamps: _Optional[_Iterable[int]] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("nonce", "incarnation")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    incarnation: int
    def __init__(self, nonce: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...
