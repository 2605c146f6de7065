"""Owns how the table of metrics reads as a page: `python -m pdlink.observability.metrics_page` prints `metrics.md`."""

from __future__ import annotations

from pdlink.observability.table import MAX_LABEL_VALUES, METRICS, OTHER, Metric

HEAD = f"""# Metrics

Printed from [`table.py`](table.py) by `python -m pdlink.observability.metrics_page`, and held to it by a test.

`PDLINK_HTTP_BIND=127.0.0.1:9400` serves them at `/metrics`, for a `Node`, for `pdlink bootstrap`, and for
`pdlink sidecar`, which shows the sum over the processes of all its engines: counters and histograms over all there have
been, killed ones too, gauges over those that run. Units are base units. A label takes at most {MAX_LABEL_VALUES} values
of one process; those that come later count as `{OTHER}`. Beside these there are the `process_*` metrics of
prometheus-client, of the process that serves. Gauges are taken when they are scraped.
"""
COLUMNS = ("metric", "kind", "unit", "labels", "fed by the event", "what it says")


def page() -> str:
    """The page in Markdown."""
    lines = [HEAD, f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *map(_line, METRICS)]
    return "\n".join(lines) + "\n"


def _line(metric: Metric) -> str:
    events = dict.fromkeys(f"`{one.event}`" for one in metric.feeds)
    labels = ", ".join(f"`{name}`" for name in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {', '.join(events)} | {metric.help} |"


if __name__ == "__main__":
    print(page(), end="")
