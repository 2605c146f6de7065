"""Owns the step from sglang's trace of a request to pdlink's spans: the span that sglang keeps for it, as the text of a
W3C `traceparent`.

It makes no span and exports none. Where sglang traces nothing, it costs a look at a flag.
"""

from __future__ import annotations

from typing import Any


def trace_parent_of(trace_ctx: Any) -> str:
    """The span of the whole request in what sglang keeps as `req.time_stats.trace_ctx`; nothing where it traces none.

    That is a `TraceReqContext`, a `TraceReqContextAsync` (SGLANG_TRACE_ASYNC) or a `TraceNullContext`. The first two
    keep that span in `root_span_context` (sglang/srt/observability/trace.py and trace_async.py).
    """
    if not trace_ctx.tracing_enable or trace_ctx.root_span_context is None:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, trace_ctx.root_span_context)
    return carrier.get("traceparent", "")
