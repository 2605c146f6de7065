"""Owns the values behind the golden frames of protocol 1: the bytes in `golden/v1.json` must read as these for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import Message

from pdlink.address import Address
from pdlink.bootstrap import error_wire, service_wire, wire
from pdlink.bootstrap.control_keys import ControlKeys
from pdlink.bootstrap.messages import PROTOCOL, PrefillServerInfo, RankInfo, Registration, Side
from pdlink.errors import NotReady
from pdlink.layout import (
    CacheLayout,
    Component,
    MemoryKind,
    ParallelSizes,
    PlanKind,
    RankCoordinates,
    Region,
    compare,
    fingerprint,
)
from pdlink.layout.components import heads, index_k, latent
from pdlink.layout.staging import StagingArea
from pdlink.secret import Secret
from pdlink.v1 import bootstrap_pb2 as pb
from pdlink.v1 import common_pb2


@dataclass(frozen=True)
class Golden:
    """A value and its two translations."""

    value: Any
    pack: Callable[[Any], Message]
    unpack: Callable[[Any], Any]
    message: type[Message]

    def read(self, data: bytes) -> Any:
        return self.unpack(service_wire.parse(self.message, data))


def layout() -> CacheLayout:
    draft: Component = replace(
        heads("k", 32, range(1), num_heads=2, head_bytes=16, dtype="float16"), name="draft.k", page_group="draft"
    )
    components = (latent(64, range(3), bytes_per_token=656, dtype="uint8"), index_k(64, (0, 2)), draft)
    return CacheLayout(3, components, 1)


def ranks() -> tuple[RankInfo, ...]:
    shares = (
        {"latent": (0, 1), "index_k": (0,), "draft.k": ()},
        {"latent": (2,), "index_k": (2,), "draft.k": (0,)},
        {},
    )
    return tuple(
        RankInfo(
            f"node{cp}/gpu{cp}",
            1_700_000_000_000_000_000 + cp,
            RankCoordinates(cp=cp),
            owned,
            tuple(region(name, layer) for name, layers in owned.items() for layer in layers),
            Address("::1", 7000 + cp),
            {"ipc": b"segment", "nixl": bytes(range(8))} if owned else {},
        )
        for cp, owned in enumerate(shares)
    )


def region(name: str, layer: int) -> Region:
    nbytes = layout().component(name).page_bytes
    if name == "latent":
        return Region(name, layer, 0x7000_0000_0000 + (layer << 32), nbytes + 4096, nbytes, 1 << 20)
    return Region(name, layer, 0x7100_0000_0000 + layer, nbytes, nbytes, 7, MemoryKind.CUDA, 3)


SIZES = ParallelSizes(cp=3)
KINDS = {"latent": PlanKind.SPLIT, "index_k": PlanKind.SPLIT, "draft.k": PlanKind.REPLICATED}
STAGING = replace(ranks()[1], staging=StagingArea(0x7200_0000_0000, 8 << 20, 4, ("mooncake", "nixl")))
DEVICE_AREA = StagingArea(0x7F30_0000_0000, 128 << 20, 4, ("ipc", "nixl"), MemoryKind.CUDA, 3)
DEVICE_STAGING = replace(ranks()[1], staging=DEVICE_AREA)
KEYS = ControlKeys(bytes(range(32)), bytes(range(32, 64)), Secret(bytes(range(64, 96))))
GUARDED = replace(ranks()[1], control_keys=KEYS)
OWNER = Secret(b"k" * 32)
REGISTRATION = Registration("glm/prefill", PROTOCOL, layout(), SIZES, KINDS, ranks()[0])
INFO = PrefillServerInfo("glm/prefill", PROTOCOL, layout(), fingerprint(layout()), SIZES, KINDS, ranks(), 12345)
UNEVEN_LAYOUTS = tuple(
    CacheLayout(1, (heads("k", 2, (0,), num_heads=count, head_bytes=4, dtype="float16", total_heads=3),))
    for count in (2, 1)
)
UNEVEN = PrefillServerInfo(
    "gqa/prefill",
    PROTOCOL,
    UNEVEN_LAYOUTS[0],
    fingerprint(UNEVEN_LAYOUTS[0]),
    ParallelSizes(tp=2),
    {"k": PlanKind.SPLIT},
    tuple(
        RankInfo(f"gpu{tp}", 1 + tp, RankCoordinates(tp=tp), {"k": (0,)}, (), Address("::1", 7000 + tp), {})
        for tp in range(2)
    ),
    7,
    UNEVEN_LAYOUTS,
)
OTHER = CacheLayout(3, (latent(32, range(3), bytes_per_token=656, dtype="uint8"),))
MISMATCHES = compare(fingerprint(layout()), fingerprint(OTHER))

GOLDENS = {
    "registration": Golden(
        REGISTRATION, service_wire.pack_registration, service_wire.unpack_registration, pb.Registration
    ),
    "rank_with_staging": Golden(STAGING, service_wire.pack_rank_info, service_wire.unpack_rank_info, pb.RankInfo),
    "rank_with_device_staging": Golden(
        DEVICE_STAGING, service_wire.pack_rank_info, service_wire.unpack_rank_info, pb.RankInfo
    ),
    "prefill_server_info": Golden(INFO, service_wire.pack_info, service_wire.unpack_info, pb.PrefillServerInfo),
    "prefill_server_info_of_uneven_heads": Golden(
        UNEVEN, service_wire.pack_info, service_wire.unpack_info, pb.PrefillServerInfo
    ),
    "worker_key": Golden(REGISTRATION.key, service_wire.pack_key, service_wire.unpack_key, pb.WorkerKey),
    "rank_with_control_keys": Golden(GUARDED, service_wire.pack_rank_info, service_wire.unpack_rank_info, pb.RankInfo),
    "endpoint_with_control_keys": Golden(
        GUARDED.endpoint, service_wire.pack_endpoint, service_wire.unpack_endpoint, pb.Endpoint
    ),
    "worker_key_of_an_owner": Golden(
        (REGISTRATION.key, OWNER.digest()),
        lambda value: service_wire.pack_key(value[0], OWNER),
        lambda message: (service_wire.unpack_key(message), service_wire.unpack_owner(message.owner_key)),
        pb.WorkerKey,
    ),
    "register_request": Golden(
        (REGISTRATION, OWNER.digest()),
        lambda value: pb.RegisterRequest(
            registration=service_wire.pack_registration(value[0]), owner_key=OWNER.reveal()
        ),
        lambda message: (
            service_wire.unpack_registration(message.registration),
            service_wire.unpack_owner(message.owner_key),
        ),
        pb.RegisterRequest,
    ),
    "resolve_request": Golden(
        ("glm/prefill", Side.of(layout()), True),
        lambda value: pb.ResolveRequest(
            instance=value[0], decode=wire.pack_side(value[1]), takes_control_keys=value[2]
        ),
        lambda message: (message.instance, wire.unpack_side(message.decode), message.takes_control_keys),
        pb.ResolveRequest,
    ),
    "endpoint": Golden(ranks()[1].endpoint, service_wire.pack_endpoint, service_wire.unpack_endpoint, pb.Endpoint),
    "side": Golden(Side.of(layout()), wire.pack_side, wire.unpack_side, common_pb2.Side),
    "refusal": Golden(
        (MISMATCHES, (ranks()[0].endpoint, ranks()[2].endpoint)),
        lambda value: pb.Refusal(
            mismatches=error_wire.pack_mismatches(value[0]),
            endpoints=[service_wire.pack_endpoint(one) for one in value[1]],
        ),
        lambda message: (
            error_wire.unpack_mismatches(message.mismatches),
            tuple(service_wire.unpack_endpoint(one) for one in message.endpoints),
        ),
        pb.Refusal,
    ),
    "error_detail": Golden(
        ("NotReady", "instance 'a' is not ready"),
        lambda value: error_wire.pack_error(NotReady(value[1])),
        lambda message: (type(error_wire.unpack_error(message)).__name__, str(error_wire.unpack_error(message))),
        common_pb2.ErrorDetail,
    ),
}
