"""Owns one process in which sglang's decode queue makes receivers for requests that it traces, or does not, and which
says as JSON what each receiver was told. It has no rank and no server.

    python -m tests.sglang.trace_process TRACEPARENT
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

ROOM = 7


def arrived(traceparent: str) -> tuple[Any, str]:
    """What the scheduler has of a request that came with that header, as it comes from the process of the API server;
    and the span that sglang made there."""
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.observability.req_time_stats import APIServerReqTimeStats, SchedulerReqTimeStats

    told = APIServerReqTimeStats(disagg_mode=DisaggregationMode.DECODE)
    told.init_trace_ctx("rid", ROOM, {"traceparent": traceparent})
    told.set_created_time()
    root = getattr(told.trace_ctx, "root_span", None) if told.trace_ctx.tracing_enable else None
    heard = APIServerReqTimeStats()
    heard.__setstate__(told.__getstate__())
    span = f"{root.get_span_context().span_id:016x}" if root else ""
    return SchedulerReqTimeStats.new_from_obj(heard), span


def told_receiver(time_stats: Any) -> str:
    """The trace that the receiver of such a request is told, made by sglang's own queue."""
    from sglang.srt.disaggregation.decode import DecodePreallocQueue
    from sglang.srt.disaggregation.utils import TransferBackend

    queue = DecodePreallocQueue.__new__(DecodePreallocQueue)
    queue.transfer_backend, queue.kv_manager, queue.queue = TransferBackend("pdlink"), SimpleNamespace(), []
    request = SimpleNamespace(bootstrap_host="127.0.0.1", bootstrap_port=1, bootstrap_room=ROOM, time_stats=time_stats)
    return str(queue._create_receiver_and_enqueue(request).kv_receiver.trace_parent)


def trace() -> None:
    """What `--enable-trace` sets up, with nowhere to send spans to."""
    import sglang.srt.observability.trace as tracing
    from opentelemetry.sdk.trace import TracerProvider

    assert tracing.opentelemetry_imported
    tracing.tracer = TracerProvider(id_generator=tracing.TraceCustomIdGenerator()).get_tracer("sglang server")
    tracing.opentelemetry_initialized = True


def trace_from_another_process() -> None:
    """What SGLANG_TRACE_ASYNC=1 sets up besides, without that process."""
    import sglang.srt.observability.trace_async as tracing

    tracing._exporter_process = SimpleNamespace(is_alive=lambda: True)


def main() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    found = {}
    for name, begin in (("off", lambda: None), ("on", trace), ("async", trace_from_another_process)):
        begin()
        time_stats, span = arrived(sys.argv[1])
        kind = type(time_stats.trace_ctx).__name__
        found[name] = {"kind": kind, "span": span, "told": told_receiver(time_stats)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
