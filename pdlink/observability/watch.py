"""Owns what one process shows to operators over HTTP, put together: its health, its readiness and its metrics."""

from __future__ import annotations

from collections.abc import Callable

from pdlink.address import Address
from pdlink.events import Events
from pdlink.observability.http import Answer, HttpServer, Probe
from pdlink.observability.metrics import Families, Metrics


class Watch:
    """Serves `/healthz`, `/readyz` and `/metrics` at `bind` until `close`, which may be called twice.

    `tell_levels` is called before each scrape, and emits what gauges are set to. Raises `ConfigError` for an address
    that cannot be bound, and where prometheus-client is missing.
    """

    def __init__(
        self,
        bind: str,
        events: Events,
        healthy: Probe,
        ready: Probe,
        tell_levels: Callable[[], None],
        among: Callable[[Families], Families] | None = None,
    ) -> None:
        """`among` adds metrics of other processes to this one's."""
        self._events = events
        self._healthy = healthy
        self._ready = ready
        self._tell_levels = tell_levels
        self._among = among
        self._metrics = Metrics(events)
        try:
            self._http = HttpServer(bind, {"/healthz": healthy, "/readyz": ready}, self._scrape, events)
        except BaseException:
            self._metrics.close()
            raise

    @property
    def address(self) -> Address:
        return self._http.address

    def close(self) -> None:
        self._http.close()
        self._metrics.close()

    def _scrape(self, accept: str) -> tuple[bytes, str]:
        self._tell_levels()
        self._events.emit("process.levels", healthy=int(self._healthy().ok), ready=int(self._ready().ok))
        return self._metrics.render(accept, self._among)


__all__ = ["Answer", "Watch"]
