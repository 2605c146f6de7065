"""Owns who may call a bootstrap: the check of the token before every RPC, and who the caller is. It knows no request.
What TLS refuses never comes this far: gRPC ends such a connection by itself, without telling.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc

from pdlink.bootstrap.rpc import ERROR_KEY, status_of
from pdlink.bootstrap.token import TOKEN_KEY, TokenDoor
from pdlink.config import PREFIX
from pdlink.denials import Denials
from pdlink.errors import AccessDenied
from pdlink.sparse_log import SparseLog

log = logging.getLogger("pdlink.bootstrap")
OPEN_METHODS = "/grpc.health.v1.Health/"
"""Probes of an orchestrator have no token, and learn nothing but that the service runs."""

Asked = TypeVar("Asked")
Told = TypeVar("Told")
AnyContext = grpc.aio.ServicerContext[Any, Any]


class TokenGate(grpc.aio.ServerInterceptor):
    """Refuses calls without a good token, before anything of the request is read. Health checks pass."""

    def __init__(self, door: TokenDoor, denials: Denials, name: Callable[[], str]) -> None:
        """`name` says what the log calls the service."""
        self._door = door
        self._name = name
        self._denials = denials

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Asked, Told] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Asked, Told] | None:
        method = handler_call_details.method
        if method.startswith(OPEN_METHODS):
            return await continuation(handler_call_details)
        fault = self._door.fault(handler_call_details.invocation_metadata or ())
        if not fault:
            return await continuation(handler_call_details)

        async def deny(requests: AsyncIterator[Asked], context: grpc.aio.ServicerContext[Asked, Told]) -> None:
            self._denials.add(self._name(), peer_host(context), fault, f"{fault} with {method}")
            where = f"set {PREFIX}TOKEN or {PREFIX}TOKEN_FILE to the one that the bootstrap has"
            code, detail = status_of(AccessDenied(f"the bootstrap refuses this side: {fault}; {where}"))
            await context.abort(code, fault, trailing_metadata=((ERROR_KEY, detail),))

        # Of this kind whatever the method's: it is run before a message was read.
        return grpc.stream_stream_rpc_method_handler(deny)


class OpenGate(grpc.aio.ServerInterceptor):
    """Lets every call pass, and tells the log of those that bring a token which nobody has asked for: whoever sends it
    takes this bootstrap for a guarded one."""

    def __init__(self, name: Callable[[], str]) -> None:
        self._name = name
        self._log = SparseLog(log)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Asked, Told] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Asked, Told] | None:
        if any(key == TOKEN_KEY for key, _ in handler_call_details.invocation_metadata or ()):
            where = f"{PREFIX}TOKEN or {PREFIX}TOKEN_FILE"
            text = "%s: a caller sends a token, but none is asked for here, so that anyone may call; set %s"
            self._log.warn("unasked", text, self._name(), where)
        return await continuation(handler_call_details)


def peer_host(context: AnyContext) -> str:
    """The caller's host, of what gRPC says as `ipv4:127.0.0.1:4711` or `ipv6:%5B::1%5D:4711`."""
    text = context.peer().partition(":")[2].rpartition(":")[0]
    return text.replace("%5B", "").replace("%5D", "").strip("[]")


def identity_of(context: AnyContext) -> str:
    """Who the caller is by the certificate that it has proved, as a short digest; empty where it showed none.

    A renewed certificate of the same subject and names is the same identity.
    """
    shown = context.auth_context() or {}
    names = [name for key in ("x509_subject", "x509_subject_alternative_name") for name in sorted(shown.get(key, ()))]
    return hashlib.sha256(b"\0".join(names)).hexdigest()[:32] if names else ""
