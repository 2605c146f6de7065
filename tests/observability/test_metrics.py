"""What events come to as Prometheus metrics: the rules of names and labels, and the page that lists them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from pdlink.events import Events
from pdlink.observability import metrics_page
from pdlink.observability.metrics import Metrics
from pdlink.observability.table import MAX_LABEL_VALUES, METRICS, OTHER, Kind
from tests.house.tree import REPO, modules
from tests.processes import run

PAGE = Path(metrics_page.__file__).with_name("metrics.md")
PULL = {
    "backend": "ipc",
    "way": "staged",
    "reason": "",
    "num_bytes": 100,
    "num_cells": 8,
    "num_descriptors": 3,
    "num_posted": 2,
    "took_s": 0.5,
    "post_s": 0.1,
    "wire_s": 0.2,
    "pack_s": 0.05,
    "unpack_s": 0.15,
    "verify_s": 0.0,
}
STAGED = {"backend": "ipc", "way": "staged"}


class Counted:
    """Metrics over events of a test's own."""

    def __init__(self) -> None:
        self.events = Events()
        self.metrics = Metrics(self.events)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


@pytest.fixture
def counted() -> Counted:
    return Counted()


def test_the_page_is_what_the_table_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == metrics_page.page()


@pytest.mark.parametrize("metric", METRICS, ids=lambda one: one.name)
def test_a_name_tells_kind_and_unit(metric) -> None:
    assert metric.name.startswith("pdlink_")
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    if metric.unit:
        assert metric.name.removesuffix("_total").endswith(f"_{metric.unit}")
    assert metric.unit in ("", "bytes", "seconds")
    assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
    assert metric.buckets == tuple(sorted(set(metric.buckets)))
    assert metric.help.endswith(".")
    assert {tuple(one.name for one in feed.labels) for feed in metric.feeds} == {metric.labels}
    assert all(bool(label.source) != bool(label.constant) for feed in metric.feeds for label in feed.labels)


def test_no_two_metrics_share_a_name() -> None:
    names = [one.name for one in METRICS]
    assert len(names) == len(set(names))


def test_every_event_that_feeds_a_metric_is_emitted_somewhere() -> None:
    source = "".join(module.source for module in modules() if not module.name.startswith("pdlink.observability.table"))
    assert [one.event for metric in METRICS for one in metric.feeds if f'"{one.event}"' not in source] == []


def test_a_staged_pull_counts_its_bytes_and_each_part_of_its_time(counted: Counted) -> None:
    counted.events.emit("pull.end", **PULL)
    counted.events.emit("pull.end", **{**PULL, "num_bytes": 11})
    assert counted.value("pdlink_transfer_bytes_total", **STAGED) == 111
    assert counted.value("pdlink_pulls_total", **STAGED) == 2
    assert counted.value("pdlink_pull_cells_total", **STAGED) == 16
    assert counted.value("pdlink_pull_descriptors_total", **STAGED) == 6
    assert counted.value("pdlink_pull_seconds_sum", **STAGED) == 1.0
    assert counted.value("pdlink_pull_wire_seconds_sum", **STAGED) == pytest.approx(0.6)
    assert counted.value("pdlink_pull_pack_seconds_sum", backend="ipc") == 0.1
    assert counted.value("pdlink_pull_unpack_seconds_sum", backend="ipc") == 0.3
    assert counted.value("pdlink_pull_unpack_seconds_bucket", backend="ipc", le="0.1") == 0
    assert counted.value("pdlink_pull_unpack_seconds_bucket", backend="ipc", le="0.25") == 2
    assert counted.value("pdlink_pull_verify_seconds_count") == 0


def test_numbers_of_numpy_count(counted: Counted) -> None:
    counted.events.emit("pull.end", **{**PULL, "num_bytes": np.int64(7), "took_s": np.float32(0.5)})
    assert counted.value("pdlink_transfer_bytes_total", **STAGED) == 7
    assert counted.value("pdlink_pull_seconds_sum", **STAGED) == 0.5


def test_a_pull_that_fails_is_no_pull_that_landed(counted: Counted) -> None:
    counted.events.emit("pull.end", **{**PULL, "reason": "backend", "num_bytes": 0})
    assert counted.value("pdlink_pull_failures_total", backend="ipc", reason="backend") == 1
    assert counted.value("pdlink_transfer_bytes_total", **STAGED) == 0
    assert counted.value("pdlink_pulls_total", **STAGED) is None
    assert counted.value("pdlink_pull_seconds_count", **STAGED) is None


def test_a_transfer_that_fails_is_counted_by_its_reason_and_is_no_duration(counted: Counted) -> None:
    counted.events.emit("transfer.end", state="failed", reason="timeout", elapsed_s=600.0, wait_s=1.0)
    counted.events.emit("transfer.end", state="done", reason="", elapsed_s=2.0, wait_s=1.5)
    assert counted.value("pdlink_transfers_total", state="failed") == 1
    assert counted.value("pdlink_transfers_total", state="done") == 1
    assert counted.value("pdlink_transfer_failures_total", reason="timeout") == 1
    assert counted.value("pdlink_transfer_failures_total", reason="") is None
    assert counted.value("pdlink_transfer_seconds_sum") == 2.0
    assert counted.value("pdlink_transfer_wait_seconds_sum") == 1.5


def test_refused_handshakes_are_told_apart_by_place_and_field(counted: Counted) -> None:
    counted.events.emit("bootstrap.refused", instance="p", field="page_size")
    counted.events.emit("bootstrap.refused", method="Register", kind="InvalidInput")
    counted.events.emit("transfer.refused", reason="incompatible", field="page_size")
    counted.events.emit("transfer.refused", reason="stale", field="")
    for place in ("bootstrap", "prefill"):
        assert counted.value("pdlink_handshake_refusals_total", at=place, field="page_size") == 1
    assert counted.value("pdlink_handshake_refusals_total", at="prefill", field="") is None
    assert counted.value("pdlink_subscribe_refusals_total", reason="stale") == 1


def test_gauges_are_set_to_the_newest_level(counted: Counted) -> None:
    counted.events.emit("node.levels", transfers_pulling=3, leases_held=2, pages_quarantined=9, peers_connected=4)
    counted.events.emit("node.levels", transfers_pulling=1, leases_held=0, pages_quarantined=8, peers_connected=5)
    assert counted.value("pdlink_transfers_live", state="pulling") == 1
    assert counted.value("pdlink_transfers_live", state="draining") == 0
    assert counted.value("pdlink_publication_leases_held") == 0
    assert counted.value("pdlink_pages_quarantined") == 8
    assert counted.value("pdlink_peers", state="connected") == 5


def test_a_label_takes_a_bounded_number_of_values(counted: Counted) -> None:
    for number in range(MAX_LABEL_VALUES + 10):
        counted.events.emit("bootstrap.refused", field=f"field {number}")
    counted.events.emit("bootstrap.refused", field="field 0")
    samples = [
        sample
        for family in counted.metrics.registry.collect()
        if family.name == "pdlink_handshake_refusals"
        for sample in family.samples
        if sample.name.endswith("_total")
    ]
    assert len(samples) == MAX_LABEL_VALUES + 1
    assert counted.value("pdlink_handshake_refusals_total", at="bootstrap", field=OTHER) == 10
    assert counted.value("pdlink_handshake_refusals_total", at="bootstrap", field="field 0") == 2


def test_an_event_that_lacks_its_fields_or_has_odd_ones_does_not_end_the_counting(counted: Counted) -> None:
    for metric in METRICS:
        for feed in metric.feeds:
            counted.events.emit(feed.event)
            counted.events.emit(feed.event, **dict.fromkeys(feed.values, "text"))
            counted.events.emit(feed.event, **dict.fromkeys(feed.values, -5))
    counted.events.emit("bootstrap.expired")
    assert counted.value("pdlink_registration_leases_expired_total") == 4


def test_one_registry_may_be_shared_and_is_left_as_it_was() -> None:
    theirs, events = CollectorRegistry(), Events()
    metrics = Metrics(events, theirs)
    events.emit("thread.died")
    assert theirs.get_sample_value("pdlink_threads_died_total") == 1
    metrics.close()
    metrics.close()
    assert list(theirs.collect()) == []
    Metrics(events, theirs).close()


def test_the_text_is_prometheus_own_format(counted: Counted) -> None:
    text, kind = counted.metrics.render("text/plain;version=0.0.4")
    assert kind.startswith("text/plain")
    assert b"# TYPE pdlink_transfer_bytes_total counter" in text
    text, kind = counted.metrics.render("application/openmetrics-text;version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")


WITHOUT = """
import sys
sys.modules["prometheus_client"] = None
sys.modules["opentelemetry"] = None
sys.modules["yaml"] = None
from pdlink.config import load_settings
from pdlink.errors import ConfigError
from pdlink.runtime.node import Node
Node(load_settings(backends="ipc")).close()
try:
    Node(load_settings(backends="ipc", http_bind="127.0.0.1:0"))
except ConfigError as error:
    print(error)
"""


def test_a_node_needs_prometheus_only_where_metrics_are_asked_for(tmp_path: Path) -> None:
    done = run([sys.executable, "-c", WITHOUT], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "metrics need the package prometheus-client; install it (pip install pdlink)\n"


def test_the_page_can_be_printed_again() -> None:
    command = [sys.executable, "-m", "pdlink.observability.metrics_page"]
    assert run(command, cwd=REPO, check=True).stdout == PAGE.read_text(encoding="utf-8")
