"""Owns which TLS connections came to a call, and so how many were refused before: gRPC tells of no handshake's failure.

It is told of each connection that begins and of each call. It opens nothing and asks no clock of its own.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc

CALL_TIMEOUT_S = 5.0
"""A connection without a call by then is one that was refused, or that asked for nothing."""
IDLE_S = 60.0
"""A caller that was silent for so long may have come back through another connection with the same port."""
MAX_REMEMBERED = 65_536

Asked = TypeVar("Asked")
Told = TypeVar("Told")


class Arrivals:
    """Connections that began, matched with peers that called. Thread-safe; times are of `clock`, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun: deque[float] = deque(maxlen=MAX_REMEMBERED)
        self._callers: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self) -> None:
        """A connection was accepted."""
        with self._lock:
            self._begun.append(self._clock())

    def call(self, peer: str) -> None:
        """`peer` (host and port) made a call; its first one accounts for a connection."""
        with self._lock:
            now = self._clock()
            while self._callers and now - next(iter(self._callers.values())) > IDLE_S:
                self._callers.popitem(last=False)
            if peer not in self._callers and self._begun:
                self._begun.popleft()
            self._callers[peer] = now
            self._callers.move_to_end(peer)
            if len(self._callers) > MAX_REMEMBERED:
                self._callers.popitem(last=False)

    def take_lost(self) -> int:
        """How many more connections have come to nothing since the last time."""
        with self._lock:
            now, lost = self._clock(), 0
            while self._begun and now - self._begun[0] > CALL_TIMEOUT_S:
                self._begun.popleft()
                lost += 1
            return lost


class CallWatch(grpc.aio.ServerInterceptor):
    """Tells `arrivals` who calls, whatever the method."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Asked, Told] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Asked, Told] | None:
        handler = await continuation(handler_call_details)
        return handler and self._told(handler)

    def _told(self, handler: grpc.RpcMethodHandler[Asked, Told]) -> grpc.RpcMethodHandler[Asked, Told]:
        makers: dict[str, Callable[..., Any]] = {
            "unary_unary": grpc.unary_unary_rpc_method_handler,
            "unary_stream": grpc.unary_stream_rpc_method_handler,
            "stream_unary": grpc.stream_unary_rpc_method_handler,
            "stream_stream": grpc.stream_stream_rpc_method_handler,
        }
        for kind, make in makers.items():
            behaviour = getattr(handler, kind)
            if behaviour is not None:
                wrapped = self._wrap(behaviour)
                made: grpc.RpcMethodHandler[Asked, Told] = make(
                    wrapped, handler.request_deserializer, handler.response_serializer
                )
                return made
        return handler

    def _wrap(self, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def run(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            self._arrivals.call(context.peer())
            return await behaviour(request, context)

        async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            self._arrivals.call(context.peer())
            async with contextlib.aclosing(behaviour(request, context)) as answers:
                async for answer in answers:
                    yield answer

        return stream if inspect.isasyncgenfunction(behaviour) else run
