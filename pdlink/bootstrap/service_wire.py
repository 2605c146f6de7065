"""Owns the translation of the bootstrap service's own messages, over the shared ones of `wire`. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from google.protobuf.message import DecodeError

from pdlink.address import Address, parse_address
from pdlink.bootstrap import wire
from pdlink.bootstrap.control_keys import ControlKeys
from pdlink.bootstrap.directory import LeaseStatus
from pdlink.bootstrap.messages import (
    MAX_RANKS,
    MAX_TRANSPORTS,
    Endpoint,
    PrefillServerInfo,
    RankInfo,
    Registration,
    WorkerKey,
    check_name,
)
from pdlink.errors import FrameError
from pdlink.layout.regions import MemoryKind
from pdlink.layout.staging import StagingArea
from pdlink.secret import Secret
from pdlink.v1 import bootstrap_pb2 as pb

MAX_REQUEST_BYTES = 4 << 20
"""A registration, a batch of renewals, or a question."""
MAX_ANSWER_BYTES = 64 << 20
"""An instance of thousands of ranks."""
MAX_RENEWALS = 16_384
MAX_ADDRESS_CHARS = 300
MIN_OWNER_BYTES, MAX_OWNER_BYTES = 16, 64

_STATUSES = {
    LeaseStatus.RENEWED: pb.LEASE_STATUS_RENEWED,
    LeaseStatus.UNKNOWN: pb.LEASE_STATUS_UNKNOWN,
    LeaseStatus.REPLACED: pb.LEASE_STATUS_REPLACED,
    LeaseStatus.NOT_OWNER: pb.LEASE_STATUS_NOT_OWNER,
}
_STATUSES_READ: dict[int, LeaseStatus] = {sent: value for value, sent in _STATUSES.items()}

T_co = TypeVar("T_co", covariant=True)


class _Parser(Protocol[T_co]):
    """A generated message class."""

    def FromString(self, data: bytes, /) -> T_co: ...


def parse(kind: _Parser[T_co], data: bytes) -> T_co:
    """Decode bytes; `FrameError` for what is not such a message."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise FrameError(f"{len(data)} bytes are not a pdlink {getattr(kind, '__name__', kind)}: {error}") from error


def pack_registration(value: Registration) -> pb.Registration:
    return pb.Registration(
        instance=value.instance,
        protocol=wire.pack_protocol(value.protocol),
        layout=wire.pack_layout(value.layout),
        sizes=wire.pack_sizes(value.sizes),
        kinds=wire.pack_kinds(value.kinds),
        rank=pack_rank_info(value.rank),
    )


def unpack_registration(message: pb.Registration) -> Registration:
    """Raises `FrameError` with the field. The protocol is read first: the rest depends on it."""
    _require(message, "registration", "protocol", "layout", "sizes", "rank")
    protocol = wire.unpack_protocol(message.protocol)
    with wire.reading("registration"):
        return Registration(
            message.instance,
            protocol,
            wire.unpack_layout(message.layout),
            wire.unpack_sizes(message.sizes),
            wire.unpack_kinds(message.kinds),
            unpack_rank_info(message.rank),
        )


def pack_rank_info(value: RankInfo) -> pb.RankInfo:
    return pb.RankInfo(
        worker_id=value.worker_id,
        incarnation=value.incarnation,
        coordinates=wire.pack_rank(value.coordinates),
        owned=wire.pack_layers(value.owned),
        regions=wire.pack_regions(value.regions),
        control_endpoint=str(value.control_endpoint),
        transports=[pb.Transport(name=name, data=data) for name, data in value.transports.items()],
        staging=_pack_staging(value.staging),
        control_keys=_pack_control_keys(value.control_keys),
        staged_only=sorted(value.staged_only),
    )


def unpack_rank_info(message: pb.RankInfo) -> RankInfo:
    _require(message, "rank", "coordinates")
    with wire.reading(f"rank {wire.clip(message.worker_id, 64)!r}"):
        return RankInfo(
            message.worker_id,
            message.incarnation,
            wire.unpack_rank(message.coordinates),
            wire.unpack_layers(message.owned),
            wire.unpack_regions(message.regions),
            _unpack_address(message.control_endpoint),
            _unpack_transports(message.transports),
            _unpack_staging(message),
            _unpack_control_keys(message),
            _unpack_staged_only(message),
        )


def pack_info(value: PrefillServerInfo) -> pb.PrefillServerInfo:
    return pb.PrefillServerInfo(
        instance=value.instance,
        protocol=wire.pack_protocol(value.protocol),
        fingerprint=wire.pack_fingerprint(value.fingerprint),
        layout=wire.pack_layout(value.layout),
        sizes=wire.pack_sizes(value.sizes),
        kinds=wire.pack_kinds(value.kinds),
        ranks=[pack_rank_info(one) for one in value.ranks],
        version=value.version,
        tp_layouts=[wire.pack_layout(one) for one in value.tp_layouts],
    )


def unpack_info(message: pb.PrefillServerInfo) -> PrefillServerInfo:
    """The whole instance. Whoever reads one from the wire compares its side first (`wire.unpack_side`)."""
    _require(message, "instance", "protocol", "fingerprint", "layout", "sizes")
    wire.bounded("ranks", len(message.ranks), MAX_RANKS)
    wire.bounded("tp_layouts", len(message.tp_layouts), MAX_RANKS)
    with wire.reading(f"instance {wire.clip(message.instance, 64)!r}"):
        return PrefillServerInfo(
            message.instance,
            wire.unpack_protocol(message.protocol),
            wire.unpack_layout(message.layout),
            wire.unpack_fingerprint(message.fingerprint),
            wire.unpack_sizes(message.sizes),
            wire.unpack_kinds(message.kinds),
            tuple(unpack_rank_info(one) for one in message.ranks),
            message.version,
            tuple(wire.unpack_layout(one) for one in message.tp_layouts),
        )


def pack_key(value: WorkerKey, owner: Secret | None = None) -> pb.WorkerKey:
    packed = pb.WorkerKey(instance=value.instance, worker_id=value.worker_id, incarnation=value.incarnation)
    if owner is not None:
        packed.owner_key = owner.reveal()
    return packed


def unpack_owner(data: bytes) -> bytes:
    """The digest of an owner key, or nothing where none was sent. The key itself is not kept."""
    if data and not MIN_OWNER_BYTES <= len(data) <= MAX_OWNER_BYTES:
        raise FrameError(f"owner_key has {len(data)} bytes, not {MIN_OWNER_BYTES}..{MAX_OWNER_BYTES}")
    return Secret(data).digest() if data else b""


def unpack_key(message: pb.WorkerKey) -> WorkerKey:
    with wire.reading("worker"):
        return WorkerKey(message.instance, message.worker_id, message.incarnation)


def pack_status(value: LeaseStatus) -> pb.LeaseStatus:
    return _STATUSES[value]


def unpack_status(value: int) -> LeaseStatus:
    status = _STATUSES_READ.get(value)
    if status is None:
        raise FrameError(f"renewal has unknown lease status {value}")
    return status


def pack_endpoint(value: Endpoint, *, with_keys: bool = True) -> pb.Endpoint:
    return pb.Endpoint(
        worker_id=value.worker_id,
        incarnation=value.incarnation,
        coordinates=wire.pack_rank(value.coordinates),
        control_endpoint=str(value.control_endpoint),
        control_keys=_pack_control_keys(value.control_keys) if with_keys else None,
    )


def unpack_endpoint(message: pb.Endpoint) -> Endpoint:
    with wire.reading(f"endpoint of {wire.clip(message.worker_id, 64)!r}"):
        return Endpoint(
            message.worker_id,
            message.incarnation,
            wire.unpack_rank(message.coordinates),
            _unpack_address(message.control_endpoint),
            _unpack_control_keys(message),
        )


def _unpack_address(text: str) -> Address:
    if len(text) > MAX_ADDRESS_CHARS:
        raise FrameError(f"control_endpoint has {len(text)} characters; at most {MAX_ADDRESS_CHARS}")
    return parse_address(text)


def _unpack_transports(messages: Sequence[pb.Transport]) -> dict[str, bytes]:
    wire.bounded("transports", len(messages), MAX_TRANSPORTS)
    transports = {one.name: one.data for one in messages}
    if len(transports) != len(messages):
        raise FrameError("transports name one twice")
    return transports


def _pack_staging(area: StagingArea | None) -> pb.StagingArea | None:
    if area is None:
        return None
    packed = pb.StagingArea(
        base_address=area.base_address,
        slot_bytes=area.slot_bytes,
        num_slots=area.num_slots,
        backends=area.backends,
        device=area.device,
    )
    if area.memory is not MemoryKind.HOST:  # which is what it means to say nothing
        packed.memory = wire.pack_memory(area.memory)
    return packed


def _unpack_staging(message: pb.RankInfo) -> StagingArea | None:
    if not message.HasField("staging"):
        return None
    area = message.staging
    wire.bounded("staging.backends", len(area.backends), MAX_TRANSPORTS)
    for name in area.backends:
        check_name("staging backend", name)
    memory = wire.unpack_memory("staging", area.memory) if area.memory else MemoryKind.HOST
    slots = (area.base_address, area.slot_bytes, area.num_slots)
    return StagingArea(*slots, tuple(area.backends), memory, area.device)


def _unpack_staged_only(message: pb.RankInfo) -> frozenset[str]:
    wire.bounded("staged_only", len(message.staged_only), MAX_TRANSPORTS)
    for name in message.staged_only:
        check_name("staged_only transport", name)
    return frozenset(message.staged_only)


def _pack_control_keys(keys: ControlKeys | None) -> pb.ControlKeys | None:
    if keys is None:
        return None
    return pb.ControlKeys(
        server_public=keys.server_public,
        client_public=keys.client_public,
        client_secret=keys.client_secret.reveal(),
    )


def _unpack_control_keys(message: pb.RankInfo | pb.Endpoint) -> ControlKeys | None:
    if not message.HasField("control_keys"):
        return None
    keys = message.control_keys
    return ControlKeys(keys.server_public, keys.client_public, Secret(keys.client_secret))


def _require(message: pb.Registration | pb.RankInfo | pb.PrefillServerInfo, what: str, *fields: str) -> None:
    for name in fields:
        if not message.HasField(name):
            raise FrameError(f"{what}.{name} is missing")
