"""Owns the translation between the values of an engine's calls and the messages of `sidecar.proto`. It opens nothing.

Whoever reads checks sizes and ranges: `FrameError` for what is malformed, and the errors of the values themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pdlink.address import parse_address
from pdlink.backends.cuda_driver import HANDLE_BYTES
from pdlink.bootstrap import error_wire
from pdlink.bootstrap import wire as shared
from pdlink.bootstrap.messages import ProtocolRange
from pdlink.decode.links import PrefillInstance
from pdlink.decode.receiver import Receiver, ReceiveResult
from pdlink.errors import FrameError, InvalidInput
from pdlink.health import HealthReport
from pdlink.layout.components import CacheLayout
from pdlink.layout.decode_plan import DecodePlace, DecodeRank, DecodeSizes
from pdlink.layout.readers import ReaderSet
from pdlink.layout.regions import Region
from pdlink.prefill.rank import PrefillRank
from pdlink.sidecar.attach import MAX_EVENTS, MAX_SEGMENTS, AttachedPool, EngineSegment, segments_of
from pdlink.sidecar.device_blocks import DeviceBlock
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.states import ReceiverState, SenderState
from pdlink.v1 import common_pb2
from pdlink.v1 import control_pb2 as control
from pdlink.v1 import sidecar_pb2 as pb

PROTOCOL = 1
"""Of `sidecar.proto`. Both ends are on one host and are installed together, so that they must be equal."""
MAX_MESSAGE_BYTES = 64 << 20
MAX_BOOTSTRAPS = 64
_PAGE_ID = np.dtype("<i8")


# --- pages ------------------------------------------------------------------------------------------


def pack_pages(page_ids: Iterable[int] | Int64Array) -> bytes:
    """Raises `InvalidInput` for what is no int64."""
    try:
        ids = np.asarray(page_ids if isinstance(page_ids, (np.ndarray, Sequence)) else list(page_ids))
        return (ids.astype(_PAGE_ID, casting="same_kind") if ids.size else ids.astype(_PAGE_ID)).tobytes()
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"page ids must be integers: {error}") from error


def unpack_pages(data: bytes) -> Int64Array:
    if len(data) % _PAGE_ID.itemsize:
        raise FrameError(f"page ids in {len(data)} bytes, which is no multiple of {_PAGE_ID.itemsize}")
    return np.frombuffer(data, dtype=_PAGE_ID).astype(np.int64)


# --- workers ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolTold:
    """What an engine says of its pool beside the regions: the process that has it, device blocks, and the events of
    publications, as `DeviceBlock`s and CUDA IPC handles. Blocks without a handle were handed over under `ticket`."""

    engine_pid: int
    blocks: Sequence[DeviceBlock] = ()
    ticket: bytes = b""
    events: Sequence[bytes] = ()


def pack_pool(regions: Sequence[Region], told: PoolTold) -> pb.Pool:
    """Raises `RegionError` for host memory that a sidecar cannot map. No device ordinal goes over the wire."""
    segments = [
        pb.EngineSegment(name=one.name, nbytes=one.nbytes, base_address=one.base_address)
        for one in segments_of(regions)
    ]
    blocks = [
        pb.DeviceBlock(gpu_uuid=one.uuid, nbytes=one.nbytes, base_address=one.base_address, ipc_handle=one.handle)
        for one in told.blocks
    ]
    return pb.Pool(
        engine_pid=told.engine_pid,
        segments=segments,
        regions=shared.pack_regions(replace(one, device=0) for one in regions),
        blocks=blocks,
        ticket=told.ticket,
        events=told.events,
    )


def unpack_pool(message: pb.Pool, take: Callable[[bytes, int], Sequence[int]]) -> AttachedPool:
    """Maps it; `take` has the file descriptors that came under a ticket. Raises `FrameError`, `RegionError`, `PeerGone`
    and what `take` raises."""
    shared.bounded("pool.segments", len(message.segments), MAX_SEGMENTS)
    shared.bounded("pool.blocks", len(message.blocks), MAX_SEGMENTS)
    shared.bounded("pool.events", len(message.events), MAX_EVENTS)
    for one in message.events:
        if len(one) != HANDLE_BYTES:
            raise FrameError(f"the handle of an event has {len(one)} bytes, not {HANDLE_BYTES}")
    segments = [EngineSegment(one.name, one.nbytes, one.base_address) for one in message.segments]
    blocks = [DeviceBlock(one.gpu_uuid, one.base_address, one.nbytes, one.ipc_handle) for one in message.blocks]
    regions = shared.unpack_regions(message.regions)
    descriptors = take(message.ticket, sum(not one.handle for one in blocks))
    return AttachedPool(segments, regions, message.engine_pid, blocks, descriptors, message.events)


def pack_prefill(worker: int, rank: PrefillRank, bootstraps: Sequence[object], told: PoolTold) -> pb.AttachPrefill:
    return pb.AttachPrefill(
        worker=worker,
        instance=rank.instance,
        protocol=shared.pack_protocol(rank.protocol),
        layout=shared.pack_layout(rank.layout),
        sizes=shared.pack_sizes(rank.sizes),
        rank=shared.pack_rank(rank.rank),
        kinds=shared.pack_kinds(rank.kinds),
        owned=shared.pack_layers(rank.owned),
        pool=pack_pool(rank.regions, told),
        bootstraps=[str(one) for one in bootstraps],
    )


def unpack_prefill(message: pb.AttachPrefill, regions: Sequence[Region]) -> PrefillRank:
    """With `regions` as they are here, and as a process of its own: of a new incarnation."""
    return PrefillRank(
        message.instance,
        shared.unpack_layout(message.layout),
        shared.unpack_sizes(message.sizes),
        shared.unpack_rank(message.rank),
        shared.unpack_kinds(message.kinds),
        shared.unpack_layers(message.owned),
        regions,
        shared.unpack_protocol(message.protocol),
    )


def pack_decode(
    worker: int,
    instance: str,
    layout: CacheLayout,
    regions: Sequence[Region],
    protocol: ProtocolRange,
    place: DecodePlace | None,
    told: PoolTold,
) -> pb.AttachDecode:
    return pb.AttachDecode(
        worker=worker,
        instance=instance,
        protocol=shared.pack_protocol(protocol),
        layout=shared.pack_layout(layout),
        pool=pack_pool(regions, told),
        place=_pack_place(place) if place else None,
    )


def _pack_place(place: DecodePlace) -> pb.DecodePlace:
    sizes, rank = place.sizes, place.rank
    return pb.DecodePlace(
        dp_size=sizes.dp,
        pp_size=sizes.pp,
        tp_size=sizes.tp,
        dcp=sizes.dcp,
        dp=rank.dp,
        pp=rank.pp,
        tp=rank.tp,
        has_owned=place.owned is not None,
        owned=shared.pack_layers(place.owned or {}),
    )


def unpack_place(message: pb.AttachDecode) -> DecodePlace | None:
    if not message.HasField("place"):
        return None
    place = message.place
    with shared.reading("place"):
        return DecodePlace(
            DecodeSizes(place.dp_size, place.pp_size, place.tp_size, place.dcp),
            DecodeRank(place.dp, place.pp, place.tp),
            shared.unpack_layers(place.owned) if place.has_owned else None,
        )


# --- requests ---------------------------------------------------------------------------------------


def pack_instance(prefill: PrefillInstance) -> pb.PrefillInstanceName:
    return pb.PrefillInstanceName(name=prefill.name, bootstraps=[str(one) for one in prefill.bootstraps])


def unpack_instance(message: pb.PrefillInstanceName) -> PrefillInstance:
    shared.bounded("bootstraps", len(message.bootstraps), MAX_BOOTSTRAPS)
    return PrefillInstance(message.name, tuple(parse_address(one) for one in message.bootstraps))


def pack_readers(readers: ReaderSet) -> common_pb2.ReaderSet:
    return common_pb2.ReaderSet(
        decode_instance=readers.decode_instance,
        reader_index=readers.reader_index,
        num_readers=readers.num_readers,
    )


def unpack_readers(message: pb.Receive) -> ReaderSet | None:
    if not message.HasField("readers"):
        return None
    readers = message.readers
    return ReaderSet(readers.decode_instance, readers.reader_index, readers.num_readers)


# --- how requests stand -----------------------------------------------------------------------------


def pack_cause(failure: Failure) -> control.Cause:
    return control.Cause(
        reason=failure.reason.value,
        text=shared.clip(failure.text),
        worker_id=shared.clip(failure.worker_id),
        stage=shared.clip(failure.stage),
        fix=shared.clip(failure.fix),
        mismatches=error_wire.pack_mismatches(failure.mismatches),
    )


def unpack_cause(message: control.Cause) -> Failure:
    mismatches = error_wire.unpack_mismatches(message.mismatches)
    told = (message.text, message.worker_id, message.stage, message.fix)
    return Failure(FailureReason(message.reason), *told, mismatches)


def standing(report: HealthReport) -> pb.Standing:
    return pb.Standing(ok=report.ok, reasons=report.reasons, parts=report.parts)


def sender_update(
    sender: int, state: SenderState, failure: Failure | None, first_pages: Mapping[str, int] | None
) -> pb.SidecarMessage:
    update = pb.SenderUpdate(sender=sender, state=state.value, first_pages=first_pages or {})
    update.has_first_pages = first_pages is not None
    if failure:
        update.failure.CopyFrom(pack_cause(failure))
    return pb.SidecarMessage(sender=update)


def receiver_update(number: int, receiver: Receiver) -> pb.SidecarMessage:
    state = receiver.state
    update = pb.ReceiverUpdate(receiver=number, state=state.value)
    if receiver.failure:
        update.failure.CopyFrom(pack_cause(receiver.failure))
    if state is ReceiverState.DONE:
        update.result.CopyFrom(_pack_result(receiver.result()))
    return pb.SidecarMessage(receiver=update)


def _pack_result(result: ReceiveResult) -> pb.Received:
    owners = [
        pb.OwnerShare(
            worker_id=worker_id,
            num_bytes=num_bytes,
            backend=result.backends.get(worker_id, ""),
            ways=result.ways.get(worker_id, ()),
        )
        for worker_id, num_bytes in result.num_bytes.items()
    ]
    received = pb.Received(owners=owners, num_descriptors=result.num_descriptors, elapsed_s=result.elapsed_s)
    if result.aux is not None:
        received.aux = result.aux
    return received


def unpack_result(message: pb.Received) -> ReceiveResult:
    return ReceiveResult(
        message.aux if message.HasField("aux") else None,
        {one.worker_id: one.num_bytes for one in message.owners},
        {one.worker_id: one.backend for one in message.owners if one.backend},
        message.num_descriptors,
        message.elapsed_s,
        {one.worker_id: tuple(one.ways) for one in message.owners if one.ways},
    )
