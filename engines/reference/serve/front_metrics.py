"""Owns the front's own count of what it has seen, as Prometheus metrics: a router's view, apart from pdlink's."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

OUTCOMES = ("ok", "failed", "refused", "left")
"""Of a request: answered whole; given up; wrong, so that it was never sent; or its caller left."""


class FrontMetrics:
    """Counters of one front. They are touched on its event loop alone."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry(auto_describe=True)
        self._requests = Counter(
            "pdlink_front_requests", "Requests that ended, by how.", ["outcome"], registry=registry
        )
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        self._tries = Counter(
            "pdlink_front_tries",
            "Tries of requests, each a transfer of its own, by how they ended.",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("ok", "failed", "left"):
            self._tries.labels(outcome)
        self._received = Counter(
            "pdlink_front_receives",
            "Tries of which decode said that it has received the prompt's cache.",
            registry=registry,
        )
        self._bytes = Counter(
            "pdlink_front_received_bytes",
            "Bytes of cache that decode said it has received.",
            ["owner"],
            registry=registry,
        )
        self._tokens = Counter("pdlink_front_tokens", "Tokens that decode has generated.", registry=registry)
        self._live = Gauge("pdlink_front_live_requests", "Requests under way.", registry=registry)
        self._first = Histogram(
            "pdlink_front_first_token_seconds",
            "From a request to its first token, failed tries included.",
            registry=registry,
        )

    def begin(self) -> None:
        self._live.inc()

    def end(self, outcome: str) -> None:
        self._live.dec()
        self._requests.labels(outcome).inc()

    def tried(self, outcome: str) -> None:
        self._tries.labels(outcome).inc()

    def received(self, pulled_bytes: Mapping[str, int]) -> None:
        self._received.inc()
        for owner, nbytes in pulled_bytes.items():
            self._bytes.labels(owner).inc(nbytes)

    def token(self) -> None:
        self._tokens.inc()

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def render(self, accept: str) -> tuple[bytes, str]:
        encode, kind = choose_encoder(accept)
        return encode(self.registry), kind
