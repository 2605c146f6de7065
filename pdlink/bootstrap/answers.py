"""Owns the question to one bootstrap address and how its answer is read and judged. It tries no second address."""

from __future__ import annotations

from collections.abc import Sequence

from pdlink.address import Address
from pdlink.bootstrap import error_wire, service_wire, wire
from pdlink.bootstrap.access import Access
from pdlink.bootstrap.compat import check, check_body
from pdlink.bootstrap.messages import PrefillServerInfo, Side
from pdlink.bootstrap.refusals import IncompatibleInstance
from pdlink.bootstrap.rpc import BootstrapUnreachable, Link
from pdlink.errors import (
    AccessDenied,
    DeadlineExceeded,
    FrameError,
    IncompatibleError,
    NotReady,
    PdlinkError,
    UnknownInstance,
)
from pdlink.v1 import bootstrap_pb2 as pb


def ask(
    address: Address, instance: str, side: Side, timeout_s: float, access: Access | None = None
) -> PrefillServerInfo:
    """One question to one address, over a channel of its own: a kept one would remember an outage that is over."""
    link = Link(address, access)
    try:
        takes_keys = link.access.may_send_secrets(address)
        request = pb.ResolveRequest(instance=instance, decode=wire.pack_side(side), takes_control_keys=takes_keys)
        data = link.call("Resolve", request, timeout_s)
        return read_answer(instance, side, service_wire.parse(pb.ResolveResponse, data))
    finally:
        link.close()


def summarise(instance: str, said: Sequence[tuple[Address, PdlinkError]]) -> PdlinkError:
    """One error for what all addresses said: the kind that says most, with the words of each."""
    if len(said) == 1:
        return said[0][1]
    errors = [error for _, error in said]
    named = (str(error) if str(address) in str(error) else f"{address}: {error}" for address, error in said)
    text = "; ".join(named)
    text = f"no bootstrap has a ready instance {instance!r}: {text}"
    if all(isinstance(error, UnknownInstance) for error in errors):
        return UnknownInstance(text)
    if any(isinstance(error, NotReady) for error in errors):
        return NotReady(text)
    if any(isinstance(error, AccessDenied) for error in errors):
        return AccessDenied(text)
    if all(isinstance(error, DeadlineExceeded) for error in errors):
        return DeadlineExceeded(text)
    return BootstrapUnreachable(text)


def read_answer(instance: str, side: Side, message: pb.ResolveResponse | pb.WatchResponse) -> PrefillServerInfo:
    """The instance, after this side's own look at protocol, fingerprint and body, in that order."""
    kind = message.WhichOneof("answer")
    if kind == "refusal":
        mismatches = error_wire.unpack_mismatches(message.refusal.mismatches)
        if not mismatches:
            raise FrameError(f"the bootstrap refused instance {instance!r} without a reason")
        endpoints = [service_wire.unpack_endpoint(one) for one in message.refusal.endpoints]
        raise IncompatibleInstance(mismatches, instance, endpoints)
    if kind != "info":
        raise FrameError(f"the bootstrap's answer about instance {instance!r} has nothing in it")
    theirs = Side(wire.unpack_protocol(message.info.protocol), wire.unpack_fingerprint(message.info.fingerprint))
    mismatches = check(theirs, side)
    if mismatches:
        raise IncompatibleError(mismatches, instance)
    info = service_wire.unpack_info(message.info)
    if info.instance != instance:
        raise FrameError(f"the bootstrap answered instance {info.instance!r} when asked for {instance!r}")
    mismatches = check_body(info)
    if mismatches:
        raise IncompatibleInstance(mismatches, instance, [one.endpoint for one in info.ranks])
    return info
