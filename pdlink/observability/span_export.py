"""Owns where spans go in a process of pdlink's own, beside an engine: to the exporter that the environment names. In an
engine's process that is the engine's to say, and nothing of this is used.

The variables are OpenTelemetry's: OTEL_TRACES_EXPORTER (`otlp` unless set), those of that exporter, OTEL_SERVICE_NAME.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import entry_points

from pdlink.errors import ConfigError

VARIABLE = "OTEL_TRACES_EXPORTER"
USUAL = "otlp"
GROUP = "opentelemetry_traces_exporter"
"""Where packages of OpenTelemetry name their exporters."""
FLUSH_TIMEOUT_S = 1.5


def export_spans(service: str) -> Callable[[], None]:
    """Export the spans of this process, as those of `service`, and return the call that sends what is left of them.

    Raises `ConfigError` without the SDK of OpenTelemetry, and for an exporter that is not installed.
    """
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError("PDLINK_TRACING=1 needs the package opentelemetry-sdk; install pdlink[otel]") from error
    name = os.environ.get(VARIABLE) or USUAL
    found = list(entry_points(group=GROUP, name=name))
    if not found:
        known = ", ".join(sorted({one.name for one in entry_points(group=GROUP)})) or "none"
        raise ConfigError(
            f"PDLINK_TRACING=1: spans cannot go to the exporter {name!r} ({VARIABLE}); installed: {known}. Install "
            "opentelemetry-exporter-otlp for otlp"
        )
    service = os.environ.get("OTEL_SERVICE_NAME") or service
    provider = TracerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(found[0].load()()))
    trace.set_tracer_provider(provider)
    return lambda: _flush(provider.force_flush)


def _flush(flush: Callable[[int], bool]) -> None:
    """In bounded time: a collector that is away must not keep a process."""
    flush(int(FLUSH_TIMEOUT_S * 1e3))
