"""Owns the translation of what operators ask and see, over the shared messages of `wire`; and the question itself."""

from __future__ import annotations

from pdlink.address import Address, parse_address
from pdlink.bootstrap import service_wire, wire
from pdlink.bootstrap.access import Access
from pdlink.bootstrap.inspection import DirectoryView, InstanceView, WorkerView
from pdlink.bootstrap.messages import MAX_RANKS, MAX_TRANSPORTS, check_name
from pdlink.bootstrap.rpc import Link
from pdlink.v1 import inspect_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["Inspector"].full_name
MAX_INSTANCES = MAX_RANKS


def look(address: Address, access: Access, timeout_s: float, instance: str = "") -> DirectoryView:
    """Ask the bootstrap at `address` for what it lists: all, or one instance.

    Raises `ConfigError` where a token would go there in plain text, `AccessDenied`, `UnknownInstance`,
    `DeadlineExceeded`, and `BootstrapUnreachable` where no bootstrap of this version answers.
    """
    link = Link(address, access)
    try:
        data = link.call("Look", pb.LookRequest(instance=instance), timeout_s, service=SERVICE)
    finally:
        link.close()
    return unpack_directory(service_wire.parse(pb.LookResponse, data))


def unpack_question(data: bytes) -> str:
    """Which instance is asked for; empty: all. Raises `FrameError` and `InvalidInput`."""
    name = service_wire.parse(pb.LookRequest, data).instance
    if name:
        check_name("instance", name)
    return name


def pack_directory(value: DirectoryView) -> bytes:
    instances = [_pack_instance(one) for one in value.instances]
    return pb.LookResponse(instances=instances, lease_s=value.lease_s).SerializeToString()


def unpack_directory(message: pb.LookResponse) -> DirectoryView:
    wire.bounded("instances", len(message.instances), MAX_INSTANCES)
    return DirectoryView(tuple(_unpack_instance(one) for one in message.instances), message.lease_s)


def _pack_instance(one: InstanceView) -> pb.InstanceView:
    return pb.InstanceView(
        name=one.name,
        version=one.version,
        not_ready=wire.clip(one.not_ready),
        protocol=wire.pack_protocol(one.protocol),
        layout=wire.pack_layout(one.layout),
        sizes=wire.pack_sizes(one.sizes),
        kinds=wire.pack_kinds(one.kinds),
        workers=[_pack_worker(worker) for worker in one.workers],
    )


def _unpack_instance(message: pb.InstanceView) -> InstanceView:
    wire.bounded("workers", len(message.workers), MAX_RANKS)
    with wire.reading("instance"):
        check_name("instance", message.name)
        return InstanceView(
            message.name,
            message.version,
            message.not_ready,
            wire.unpack_protocol(message.protocol),
            wire.unpack_layout(message.layout),
            wire.unpack_sizes(message.sizes),
            wire.unpack_kinds(message.kinds),
            tuple(_unpack_worker(one) for one in message.workers),
        )


def _pack_worker(one: WorkerView) -> pb.WorkerView:
    return pb.WorkerView(
        worker_id=one.worker_id,
        incarnation=one.incarnation,
        coordinates=wire.pack_rank(one.coordinates),
        owned=wire.pack_layers(one.owned),
        control_endpoint=str(one.control_endpoint),
        transports=one.transports,
        num_staging_slots=one.num_staging_slots,
        staging_slot_bytes=one.staging_slot_bytes,
        has_control_keys=one.has_control_keys,
        lease_left_s=one.lease_left_s,
    )


def _unpack_worker(message: pb.WorkerView) -> WorkerView:
    wire.bounded("transports", len(message.transports), MAX_TRANSPORTS)
    check_name("worker_id", message.worker_id)
    for name in message.transports:
        check_name("transport", name)
    return WorkerView(
        message.worker_id,
        message.incarnation,
        wire.unpack_rank(message.coordinates),
        wire.unpack_layers(message.owned),
        parse_address(wire.clip(message.control_endpoint, service_wire.MAX_ADDRESS_CHARS)),
        tuple(message.transports),
        message.num_staging_slots,
        message.staging_slot_bytes,
        message.has_control_keys,
        message.lease_left_s,
    )
