"""Owns a collector of OpenTelemetry spans as sglang exports them: OTLP over HTTP, kept in memory."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.processes import wait_until

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    trace_id: str
    span_id: str
    parent_id: str


class Collector:
    """What has come so far. Any thread."""

    def __init__(self, port: int) -> None:
        self.environ = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
        self.arguments = ["--enable-trace", "--otlp-traces-endpoint", f"http://{HOST}:{port}/v1/traces"]
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    def keep(self, body: bytes) -> None:
        told = ExportTraceServiceRequest.FromString(body)
        spans = [one for resource in told.resource_spans for scope in resource.scope_spans for one in scope.spans]
        with self._lock:
            self._spans += [
                Span(one.name, one.trace_id.hex(), one.span_id.hex(), one.parent_span_id.hex()) for one in spans
            ]

    def of_trace(self, trace_id: str) -> list[Span]:
        with self._lock:
            return [one for one in self._spans if one.trace_id == trace_id]

    def wait_for(self, trace_id: str, *beginnings: str) -> list[Span]:
        """All spans of a trace, once there is one whose name begins so for each of `beginnings`, or after a while."""

        def are_there() -> bool:
            names = [one.name for one in self.of_trace(trace_id)]
            return all(any(name.startswith(one) for name in names) for one in beginnings)

        wait_until(are_there)
        return self.of_trace(trace_id)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector at a port of its own, which `Collector.arguments` name to sglang."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.keep(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: pytest shows what matters."""

    with ThreadingHTTPServer((HOST, 0), Handler) as server:
        server.daemon_threads = True
        collector = Collector(server.server_port)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
