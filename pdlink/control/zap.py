"""Owns the answers to ZAP requests (ZeroMQ RFC 27): which CURVE client may talk to which socket. No I/O.

libzmq asks them over inproc, before a frame of the client is handed on.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ENDPOINT = "inproc://zeromq.zap.01"
VERSION = b"1.0"
MIN_PARTS = 8
"""Route, delimiter, version, request id, domain, address, identity and mechanism; credentials follow."""


@dataclass(frozen=True, slots=True)
class ZapAnswer:
    """The reply, part by part, and whom it turns away (empty: nobody)."""

    parts: list[bytes]
    domain: bytes
    denied: str = ""


def answer(request: Sequence[bytes], allowed: Mapping[bytes, bytes]) -> ZapAnswer | None:
    """The answer to a request as a ROUTER hears it; None for what is no request. `allowed` is domain -> public key."""
    if len(request) < MIN_PARTS or request[2] != VERSION:
        return None
    route, _, _, request_id, domain, address, _, mechanism, *credentials = request
    known = allowed.get(domain)
    good = known is not None and mechanism == b"CURVE" and len(credentials) == 1
    good = good and hmac.compare_digest(credentials[0], known or b"")
    status, text = (b"200", b"OK") if good else (b"400", b"unknown key")
    parts = [route, b"", VERSION, request_id, status, text, b"", b""]
    return ZapAnswer(parts, domain, "" if good else address.decode("ascii", "replace") or "a peer")
