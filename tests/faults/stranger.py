"""Owns what a stranger says to a bootstrap service: requests that have been valid once, damaged, and plain noise."""

from __future__ import annotations

import contextlib
import random
import socket

import grpc

from pdlink.bootstrap import service_wire, wire
from pdlink.bootstrap.messages import PROTOCOL, Side, WorkerKey
from pdlink.bootstrap.rpc import SERVICE
from pdlink.v1 import bootstrap_pb2 as pb
from tests.bootstrap.values import make_instance
from tests.faults.mutate import any_damage
from tests.faults.shape import make_layout

CALL_TIMEOUT_S = 2.0
METHODS = ("Register", "Renew", "Withdraw", "Resolve", "Watch")


def valid_requests() -> dict[str, bytes]:
    """One of each method, about workers that are not there."""
    key = service_wire.pack_key(WorkerKey("pre", "pre/dp0.pp0.cp9.tp0", 1))
    registration = service_wire.pack_registration(make_instance()[0])
    side = wire.pack_side(Side.of(make_layout(), PROTOCOL))
    return {
        "Register": pb.RegisterRequest(registration=registration, owner_key=b"k" * 32).SerializeToString(),
        "Renew": pb.RenewRequest(workers=[key]).SerializeToString(),
        "Withdraw": pb.WithdrawRequest(worker=key).SerializeToString(),
        "Resolve": pb.ResolveRequest(instance="pre", decode=side).SerializeToString(),
        "Watch": pb.WatchRequest(instance="pre", decode=side).SerializeToString(),
    }


def shout_at_bootstrap(address: str, chance: random.Random, num_calls: int) -> int:
    """Damaged requests, and bytes that are no gRPC at all; how many the service refused."""
    refused, known = 0, valid_requests()
    with grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        for _ in range(num_calls):
            method = chance.choice(METHODS)
            data = any_damage(chance).to(known[method])
            try:
                if method == "Watch":
                    stream = channel.unary_stream(f"/{SERVICE}/{method}")(data, timeout=CALL_TIMEOUT_S)
                    next(stream)
                    stream.cancel()
                else:
                    channel.unary_unary(f"/{SERVICE}/{method}")(data, timeout=CALL_TIMEOUT_S)
            except grpc.RpcError:
                refused += 1
    host, _, port = address.rpartition(":")
    for _ in range(3):
        with socket.create_connection((host, int(port)), CALL_TIMEOUT_S) as raw, contextlib.suppress(OSError):
            raw.sendall(chance.randbytes(1024))
    return refused
