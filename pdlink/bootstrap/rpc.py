"""Owns what both ends of the bootstrap RPCs must agree on: method names, limits, channels, and errors as status.

The server side handles requests in `server`; callers go through `Link`, which raises the error that the service
raised, or says what stands at the address instead of a pdlink bootstrap.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import grpc
from google.protobuf.message import Message

from pdlink.address import Address
from pdlink.bootstrap import error_wire, service_wire
from pdlink.bootstrap.access import Access
from pdlink.bootstrap.diagnosis import why_no_talk
from pdlink.errors import (
    AccessDenied,
    DeadlineExceeded,
    FrameError,
    IncompatibleError,
    InvalidInput,
    NotOwner,
    NotReady,
    PdlinkError,
    StaleIncarnation,
    StateError,
    UnknownInstance,
)
from pdlink.v1 import bootstrap_pb2 as pb
from pdlink.v1 import common_pb2

SERVICE = pb.DESCRIPTOR.services_by_name["Bootstrap"].full_name
ERROR_KEY = "pdlink-error-bin"
CONNECT_PROBE_TIMEOUT_S = 0.5

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),  # two services on one port would each see half of the ranks
    ("grpc.max_receive_message_length", service_wire.MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", service_wire.MAX_ANSWER_BYTES),
    ("grpc.max_connection_idle_ms", 300_000),  # callers that ask nothing must not keep their connections for ever
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel must not inherit another one's back-off
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", service_wire.MAX_ANSWER_BYTES),
    ("grpc.max_send_message_length", service_wire.MAX_REQUEST_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)
_CODES: tuple[tuple[type[PdlinkError], grpc.StatusCode], ...] = (
    (UnknownInstance, grpc.StatusCode.NOT_FOUND),
    (NotReady, grpc.StatusCode.FAILED_PRECONDITION),
    (IncompatibleError, grpc.StatusCode.FAILED_PRECONDITION),
    (StaleIncarnation, grpc.StatusCode.ABORTED),
    (NotOwner, grpc.StatusCode.PERMISSION_DENIED),
    (AccessDenied, grpc.StatusCode.UNAUTHENTICATED),
    (InvalidInput, grpc.StatusCode.INVALID_ARGUMENT),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
)


class BootstrapUnreachable(PdlinkError):
    """No pdlink bootstrap answers at an address: nothing listens there, or something else does."""


class AnswerStream(Protocol):
    """The answers of one streaming call."""

    def __iter__(self) -> Iterator[bytes]: ...

    def cancel(self) -> bool: ...


class Link:
    """One channel to one address. Thread-safe; `close` cancels what is under way and may be called twice.

    Raises `ConfigError` where `access` has secrets that must not go there in plain text.
    """

    def __init__(self, address: Address, access: Access | None = None) -> None:
        self.address = address
        self.access = access or Access()
        self._channel = self.access.open(address, CHANNEL_OPTIONS)

    def call(self, method: str, request: Message, timeout_s: float, *, service: str = SERVICE) -> bytes:
        """The answer's bytes. Raises the service's error, `DeadlineExceeded` or `BootstrapUnreachable`."""
        send: Callable[..., bytes] = self._channel.unary_unary(f"/{service}/{method}")
        try:
            return send(request.SerializeToString(), timeout=timeout_s, metadata=self.access.metadata())
        except grpc.RpcError as error:
            raise self.translate(error, timeout_s) from error
        except ValueError as error:
            raise self._closed() from error

    def stream(self, method: str, request: Message) -> AnswerStream:
        """The answers as they come; iterating raises `grpc.RpcError`, for `translate`."""
        open_stream: Callable[..., AnswerStream] = self._channel.unary_stream(f"/{SERVICE}/{method}")
        try:
            return open_stream(request.SerializeToString(), metadata=self.access.metadata())
        except ValueError as error:
            raise self._closed() from error

    def translate(self, error: grpc.RpcError, timeout_s: float) -> PdlinkError:
        """What a failed call means: the service's own error where it sent one, else what is wrong with the address."""
        return _translate(error, self.address, self.access, timeout_s)

    def close(self) -> None:
        self._channel.close()

    def _closed(self) -> StateError:
        return StateError(f"the channel to bootstrap {self.address} is closed")


def status_of(error: PdlinkError) -> tuple[grpc.StatusCode, bytes]:
    """The status code of an error, and its detail for the trailing metadata."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    return code, error_wire.pack_error(error).SerializeToString()


def _translate(error: grpc.RpcError, address: Address, access: Access, timeout_s: float) -> PdlinkError:
    sent = _detail(_trailing(error))
    if sent is not None:
        return sent
    code, details = _status(error)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(
            f"bootstrap {address} did not answer within {timeout_s:.3g} s (resolve_timeout_s); check that a pdlink "
            "bootstrap runs at this address"
        )
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return FrameError(f"bootstrap {address} refused the size of a message: {details}")
    if code is grpc.StatusCode.INTERNAL:
        return PdlinkError(f"bootstrap {address} failed inside: {details}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return BootstrapUnreachable(f"the gRPC server at {address} is not a pdlink bootstrap")
    if code is grpc.StatusCode.UNAVAILABLE and not _listens(address):
        return BootstrapUnreachable(f"nothing listens at bootstrap address {address}; start it, or correct the address")
    denied = why_no_talk(address, access) if code is grpc.StatusCode.UNAVAILABLE else None
    return denied or BootstrapUnreachable(
        f"what listens at {address} does not answer as a pdlink bootstrap ({code.name.lower()}: {details})"
    )


def _listens(address: Address) -> bool:
    try:
        socket.create_connection((address.host, address.port), CONNECT_PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _status(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    if not isinstance(error, grpc.Call):
        return grpc.StatusCode.UNKNOWN, str(error)
    return error.code() or grpc.StatusCode.UNKNOWN, " ".join((error.details() or "").split())[:300]


def _trailing(error: grpc.RpcError) -> Iterable[tuple[str, str | bytes]]:
    return (error.trailing_metadata() or ()) if isinstance(error, grpc.Call) else ()


def _detail(metadata: Iterable[tuple[str, str | bytes]]) -> PdlinkError | None:
    for key, value in metadata:
        if key == ERROR_KEY and isinstance(value, bytes):
            try:
                return error_wire.unpack_error(service_wire.parse(common_pb2.ErrorDetail, value))
            except FrameError:
                return None
    return None
