"""Spans of requests: whose children they are, what they last, and that a trace context goes from decode to prefill."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pdlink.events import Events
from pdlink.observability import tracing
from pdlink.observability.tracing import Tracing
from pdlink.transfer.trace_parent import clean
from tests.link.rig import PAGE_SIZE, Site, make_layout, wait_until

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
PATIENCE_S = 30.0
END = {
    "transfer_id": "t",
    "attempt": 7,
    "decode": "d",
    "state": "done",
    "reason": "",
    "num_bytes": 100,
    "elapsed_s": 1.0,
    "resolve_s": 0.25,
    "plan_s": 0.125,
    "wait_s": 0.25,
    "pull_s": 0.375,
    "confirm_s": 0.125,
    "trace_parent": PARENT,
}
PULL = {"transfer_id": "t", "attempt": 7, "worker_id": "w", "reason": "", "took_s": 0.25, "verify_s": 0.125}


class Traced:
    """Spans that some events have come to."""

    def __init__(self, events: Events | None = None) -> None:
        self.events = events or Events()
        self._kept = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._kept))
        self.tracing = Tracing(self.events, provider)

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._kept.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [one for one in self.spans if one.name == name]

    def one(self, name: str) -> ReadableSpan:
        (found,) = self.named(name)
        return found


def seconds(span: ReadableSpan) -> float:
    return (span.end_time - span.start_time) / 1e9


def parent(span: ReadableSpan) -> str:
    return f"{span.parent.span_id:016x}" if span.parent else ""


def number(span: ReadableSpan) -> str:
    return f"{span.context.span_id:016x}"


def test_a_receive_has_a_span_for_each_part_one_after_the_other() -> None:
    traced = Traced()
    traced.events.emit("pull.end", **PULL)
    traced.events.emit("pull.end", **{**PULL, "attempt": 6})
    traced.events.emit("transfer.end", **END)
    root = traced.one("pdlink.receive")
    assert (f"{root.context.trace_id:032x}", parent(root)) == (TRACE, SPAN)
    assert root.attributes["pdlink.transfer_id"] == "t"
    assert root.attributes["pdlink.num_bytes"] == 100
    parts = [traced.one(name) for name in ("resolve", "wait", "merge", "confirm")]
    assert [parent(one) for one in parts] == [number(root)] * 4
    assert [seconds(one) for one in (root, *parts)] == [1.0, 0.25, 0.25, 0.375, 0.125]
    assert parts[0].start_time == root.start_time
    assert [one.end_time for one in parts] == [*(one.start_time for one in parts[1:]), root.end_time]
    plan = traced.one("plan")
    assert (parent(plan), seconds(plan), plan.end_time) == (number(root), 0.125, parts[0].end_time)
    pull, verify = traced.one("pull"), traced.one("verify")
    assert (parent(pull), parent(verify)) == (number(parts[2]), number(pull))
    assert (seconds(pull), seconds(verify)) == (0.375, 0.125)
    assert pull.attributes["pdlink.worker_id"] == "w"


def test_what_fails_has_its_reason_as_the_status() -> None:
    traced = Traced()
    traced.events.emit("transfer.end", **{**END, "state": "failed", "reason": "timeout", "pull_s": 0.0})
    root = traced.one("pdlink.receive")
    assert (root.status.is_ok, root.status.description) == (False, "timeout")
    assert traced.named("merge") == []


@pytest.mark.parametrize("text", ["", "00-xyz", PARENT.replace(TRACE, "0" * 32)])
def test_without_a_context_a_request_begins_a_trace_of_its_own(text: str) -> None:
    traced = Traced()
    traced.events.emit("transfer.end", **{**END, "trace_parent": text})
    traced.events.emit("request.end", transfer_id="t", elapsed_s=0.5, trace_parent=text)
    for name in ("pdlink.receive", "pdlink.publish"):
        assert traced.one(name).parent is None


def test_an_event_that_lacks_its_fields_does_not_end_the_tracing() -> None:
    traced = Traced()
    for name in ("pull.end", "transfer.end", "request.end"):
        traced.events.emit(name)
        traced.events.emit(name, elapsed_s="soon", transfer_id=5)
    traced.events.emit("request.end")
    assert len(traced.named("pdlink.publish")) == 3


def test_pulls_of_requests_that_never_end_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_REQUESTS", 4)
    monkeypatch.setattr(tracing, "MAX_PULLS", 2)
    traced = Traced()
    for request in range(10):
        for _ in range(5):
            traced.events.emit("pull.end", **{**PULL, "transfer_id": str(request)})
    assert list(traced.tracing._pulls) == [(str(request), 7) for request in range(6, 10)]
    assert {len(kept) for kept in traced.tracing._pulls.values()} == {2}


def test_no_spans_are_made_after_close() -> None:
    traced = Traced()
    traced.tracing.close()
    traced.tracing.close()
    traced.events.emit("transfer.end", **END)
    assert traced.spans == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        PARENT.upper(),
        PARENT[:-1],
        f"{PARENT}-more",
        PARENT.replace("00-", "ff-"),
        PARENT.replace(SPAN, "0" * 16),
        f" {PARENT}",
        f"{PARENT}\n",
    ],
)
def test_a_text_that_is_no_trace_context_is_dropped(text: str) -> None:
    assert clean(text) == ""
    assert clean(PARENT) == PARENT


@pytest.mark.backend("ipc")
def test_the_context_of_the_engine_reaches_every_owner(site: Site) -> None:
    layout = make_layout(4)
    owners, decode = site.prefill(layout, 2, verify_digests=True), site.decode(layout, verify_digests=True)
    ours, theirs = Traced(decode.node.events), [Traced(owner.node.events) for owner in owners]
    receiver = decode.worker.receive("t", site.instance, {"kv": [1, 2]}, 2 * PAGE_SIZE, trace_parent=PARENT)
    for owner in owners:
        owner.open("t", {"kv": [3, 4]}).publish([3, 4], last=True)
    receiver.wait(PATIENCE_S)
    wait_until(lambda: len(ours.named("pdlink.receive")) == 1, PATIENCE_S)
    for one in theirs:
        wait_until(lambda one=one: len(one.named("pdlink.publish")) == 1, PATIENCE_S)
    roots = [ours.one("pdlink.receive"), *(one.one("pdlink.publish") for one in theirs)]
    assert {f"{one.context.trace_id:032x}" for one in roots} == {TRACE}
    assert {parent(one) for one in roots} == {SPAN}
    assert {one.name for one in ours.spans} == {
        *("pdlink.receive", "resolve", "plan", "wait", "merge", "confirm", "pull", "verify")
    }
    names = [owner.worker.rank.worker_id for owner in owners]
    assert sorted(one.attributes["pdlink.worker_id"] for one in ours.named("pull")) == names
    assert [one.one("pdlink.publish").attributes["pdlink.worker_id"] for one in theirs] == names


def test_a_setting_turns_spans_on(site: Site) -> None:
    assert site.node()._tracing is None
    node = site.node(tracing=True)
    assert node._tracing is not None
    node.events.emit("transfer.end", **END)  # no provider is set up: nothing is made, and nothing breaks
