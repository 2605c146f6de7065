"""Owns the spans of requests: a listener that makes OpenTelemetry spans of events, once a request has ended. It exports
nothing: that is the tracer provider's, which the process sets up.

A receive is `pdlink.receive` with `resolve`, `plan`, `wait`, `merge` (from the first page to the last, with a `pull`
for each pull from an owner, and `verify` where digests are compared) and `confirm`. A published request is
`pdlink.publish`. Both are children of the trace context that the engine gave to `receive`, which goes to the owners
with the subscribe.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from pdlink.errors import ConfigError
from pdlink.events import Event, Events

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, TracerProvider

MAX_REQUESTS = 16_384
MAX_PULLS = 1024
"""Of one request; the rest has no span."""
PHASES = (("resolve", "resolve_s"), ("wait", "wait_s"), ("merge", "pull_s"), ("confirm", "confirm_s"))
ATTRIBUTES = (
    "transfer_id",
    "decode",
    "prefill",
    "worker_id",
    "num_bytes",
    "num_pages",
    "num_readers",
    "state",
    "reason",
)
OF_PULLS = ("worker_id", "backend", "way", "num_bytes", "num_cells", "num_descriptors", "num_posted", "reason")


@dataclass(frozen=True, slots=True)
class _Pull:
    """A pull that has ended, and when (ns since the epoch)."""

    fields: Mapping[str, object]
    ended_ns: int


class Tracing:
    """Spans for `events` from now on. `close` twice is fine. Raises `ConfigError` without opentelemetry-api."""

    def __init__(self, events: Events, provider: TracerProvider | None = None) -> None:
        """`provider` is the process's own unless given."""
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise ConfigError("spans need the package opentelemetry-api; install pdlink[otel]") from error
        self._tracer = trace.get_tracer("pdlink", tracer_provider=provider)
        self._pulls: OrderedDict[tuple[object, object], list[_Pull]] = OrderedDict()
        self._lock = threading.Lock()
        self._unsubscribe: Callable[[], None] = events.subscribe(self._hear)

    def close(self) -> None:
        """Make no more spans. Those that are made are their provider's to export."""
        self._unsubscribe()

    def _hear(self, event: Event) -> None:
        if event.name == "pull.end":
            self._keep(event.fields)
        elif event.name == "transfer.end":
            self._receive(event.fields)
        elif event.name == "request.end":
            self._publish(event.fields)

    def _keep(self, fields: Mapping[str, object]) -> None:
        """Until the request ends: its span is not there yet."""
        with self._lock:
            kept = self._pulls.setdefault((fields.get("transfer_id"), fields.get("attempt")), [])
            if len(kept) < MAX_PULLS:
                kept.append(_Pull(fields, time.time_ns()))
            while len(self._pulls) > MAX_REQUESTS:
                self._pulls.popitem(last=False)

    def _receive(self, fields: Mapping[str, object]) -> None:
        with self._lock:
            pulls = self._pulls.pop((fields.get("transfer_id"), fields.get("attempt")), [])
        ended = time.time_ns() - _ns(fields, "ago_s")
        began = ended - _ns(fields, "elapsed_s")
        root = self._span("pdlink.receive", began, _parent(fields), _picked(fields, ATTRIBUTES))
        inside = _within(root)
        at = began
        for name, source in PHASES:
            took = _ns(fields, source)
            if not took and name != "resolve":
                continue
            span = self._span(name, at, inside, {})
            if name == "merge":
                for pull in pulls:
                    self._pull(pull, _within(span))
            span.end(at + took)
            at += took
            if name == "resolve" and (planned := _ns(fields, "plan_s")):
                self._span("plan", at - min(planned, took), inside, {}).end(at)
        self._end(root, fields, ended)

    def _pull(self, pull: _Pull, inside: Context) -> None:
        verified = _ns(pull.fields, "verify_s")
        landed = pull.ended_ns - verified
        span = self._span("pull", landed - _ns(pull.fields, "took_s"), inside, _picked(pull.fields, OF_PULLS))
        for name in ("post_s", "pack_s", "wire_s", "unpack_s"):
            span.set_attribute(f"pdlink.{name}", cast(float, pull.fields.get(name, 0.0)))
        if verified:
            self._span("verify", landed, _within(span), {}).end(pull.ended_ns)
        self._end(span, pull.fields, pull.ended_ns)

    def _publish(self, fields: Mapping[str, object]) -> None:
        ended = time.time_ns()
        began = ended - _ns(fields, "elapsed_s")
        span = self._span("pdlink.publish", began, _parent(fields), _picked(fields, ATTRIBUTES))
        self._end(span, fields, ended)

    def _span(self, name: str, began_ns: int, inside: Context | None, attributes: Mapping[str, str | int]) -> Span:
        return self._tracer.start_span(name, inside, attributes=dict(attributes), start_time=began_ns)

    def _end(self, span: Span, fields: Mapping[str, object], ended_ns: int) -> None:
        from opentelemetry.trace import Status, StatusCode

        if reason := fields.get("reason"):
            span.set_status(Status(StatusCode.ERROR, str(reason)))
        span.end(ended_ns)


def _parent(fields: Mapping[str, object]) -> Context | None:
    """The engine's context. An empty one where there is none, so that what this thread does elsewhere is no parent."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {"traceparent": str(fields.get("trace_parent") or "")}
    return TraceContextTextMapPropagator().extract(carrier, context=Context())


def _within(span: Span) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace import set_span_in_context

    return set_span_in_context(span, Context())


def _picked(fields: Mapping[str, object], names: tuple[str, ...]) -> dict[str, str | int]:
    found = {f"pdlink.{name}": fields[name] for name in names if name in fields}
    return {name: value for name, value in found.items() if isinstance(value, str | int) and value != ""}


def _ns(fields: Mapping[str, object], name: str) -> int:
    value = fields.get(name, 0.0)
    return int(value * 1e9) if isinstance(value, int | float) else 0
