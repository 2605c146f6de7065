"""Owns gRPC's health service as a sidecar has it: watches that can hold up nothing but other watches."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from pdlink.threads import handler_threads

MAX_WATCHES = 16
"""At once, in this process; further ones wait until others end."""


class Healthy(health.HealthServicer):
    """The library's own, but for the threads that its watches take.

    Watches that take no thread ("non-blocking", its default) can stop the whole server for good: a message to a watcher
    is sent with the servicer's lock held, and waits for the server's one thread of events, which waits for that lock
    where another watcher has just gone (grpcio-health-checking 1.85, `HealthServicer._on_close_callback`). Watches that
    take one leave no such wait, but must not take those of engines.
    """

    def __init__(self) -> None:
        # Kept by the library as attributes of the function `Watch` below: one for all servers of this process.
        super().__init__(experimental_non_blocking=False, experimental_thread_pool=_watch_threads())

    def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext, send_response_callback: Any = None
    ) -> Any:
        return super().Watch(request, context, send_response_callback)


@cache
def _watch_threads() -> ThreadPoolExecutor:
    return handler_threads("pdlink-sidecar-watched", MAX_WATCHES)
