"""Owns the counting: a listener that turns events into Prometheus metrics, as the table says. It serves nothing.

Whoever embeds pdlink and serves metrics already passes the registry that it serves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from numbers import Real
from typing import TYPE_CHECKING, Protocol, TypeAlias

from pdlink.errors import ConfigError
from pdlink.events import Event, Events
from pdlink.observability.table import MAX_LABEL_VALUES, METRICS, OTHER, Feed, Kind, Metric

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
    from prometheus_client.metrics_core import Metric as Family

    Instrument: TypeAlias = Counter | Gauge | Histogram

log = logging.getLogger("pdlink.metrics")


class Families(Protocol):
    """What has metrics to show: a registry, or the sum of several."""

    def collect(self) -> Iterable[Family]: ...


class Metrics:
    """Every metric of the table, fed by `events` from now on. `close` twice is fine.

    Raises `ConfigError` without the package prometheus-client.
    """

    def __init__(self, events: Events, registry: CollectorRegistry | None = None) -> None:
        """`registry` is one of its own unless given."""
        try:
            import prometheus_client as prometheus
        except ImportError as error:
            raise ConfigError("metrics need the package prometheus-client; install it (pip install pdlink)") from error
        self.registry = registry or prometheus.CollectorRegistry(auto_describe=True)
        if registry is None:
            prometheus.ProcessCollector(registry=self.registry)
        self._taps: dict[str, list[_Tap]] = {}
        self._instruments = []
        for metric in METRICS:
            instrument = _make(metric, self.registry)
            self._instruments.append(instrument)
            bounds = [_Bound() for _ in metric.labels]
            for feed in metric.feeds:
                self._taps.setdefault(feed.event, []).append(_Tap(metric, feed, instrument, bounds))
        self._unsubscribe: Callable[[], None] = events.subscribe(self._hear)

    def render(self, accept: str = "", among: Callable[[Families], Families] | None = None) -> tuple[bytes, str]:
        """The metrics in the format that a scraper accepts, and its content type. `among` adds those of others."""
        from prometheus_client.exposition import choose_encoder

        encode, kind = choose_encoder(accept)
        return encode(among(self.registry) if among else self.registry), kind

    def close(self) -> None:
        """Count no more, and leave a registry that others serve."""
        self._unsubscribe()
        instruments, self._instruments = self._instruments, []
        for one in instruments:
            self.registry.unregister(one)

    def _hear(self, event: Event) -> None:
        for tap in self._taps.get(event.name, ()):
            tap.take(event)


class _Bound:
    """The values of one label that are kept apart: the first `MAX_LABEL_VALUES`."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def of(self, value: str) -> str:
        if value not in self._seen:
            if len(self._seen) >= MAX_LABEL_VALUES:
                return OTHER
            self._seen.add(value)
        return value


class _Tap:
    """One feed of one metric. Thread-safe."""

    def __init__(self, metric: Metric, feed: Feed, instrument: Instrument, bounds: list[_Bound]) -> None:
        self._kind = metric.kind
        self._feed = feed
        self._instrument = instrument
        self._bounds = bounds
        self._only = tuple(feed.only.items())
        self._children: dict[tuple[str, ...], Instrument] = {}
        self._lock = threading.Lock()
        if not feed.labels:
            self._children[()] = instrument
        elif all(one.constant for one in feed.labels):  # known, and so shown from the start
            self._child(tuple(one.constant for one in feed.labels))

    def take(self, event: Event) -> None:
        fields = event.fields
        for name, wanted in self._only:
            if (bool(fields.get(name)) if wanted is True else str(fields.get(name, ""))) != wanted:
                return
        told = tuple(one.constant or str(fields.get(one.source, "")) for one in self._feed.labels)
        child = self._children.get(told) or self._child(told)
        amount = sum(_number(fields.get(name)) for name in self._feed.values) if self._feed.values else 1.0
        if self._kind is Kind.COUNTER:
            child.inc(max(0.0, amount))  # type: ignore[union-attr]
        elif self._kind is Kind.GAUGE:
            child.set(amount)  # type: ignore[union-attr]
        else:
            child.observe(amount)  # type: ignore[union-attr]

    def _child(self, told: tuple[str, ...]) -> Instrument:
        with self._lock:
            bounded = tuple(bound.of(value) for bound, value in zip(self._bounds, told, strict=True))
            child = self._instrument.labels(*bounded)
            if bounded == told:  # others stay few, too
                self._children[told] = child
            return child


def _make(metric: Metric, registry: CollectorRegistry) -> Instrument:
    import prometheus_client as prometheus

    if metric.kind is Kind.HISTOGRAM:
        return prometheus.Histogram(metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets)
    if metric.kind is Kind.COUNTER:
        return prometheus.Counter(metric.name, metric.help, metric.labels, registry=registry)
    # The mode counts where several processes share a page (`shared_metrics`): the sum over those that live.
    return prometheus.Gauge(metric.name, metric.help, metric.labels, registry=registry, multiprocess_mode="livesum")


def _number(value: object) -> float:
    """Those of numpy are numbers, too."""
    return float(value) if isinstance(value, Real) else 0.0
