"""Owns what a bootstrap service tells probes and scrapers of itself. It serves nothing (see `watch`)."""

from __future__ import annotations

from pdlink.bootstrap.server import BootstrapServer
from pdlink.errors import DeadlineExceeded, PartDead
from pdlink.events import Events
from pdlink.observability.http import Answer
from pdlink.observability.watch import Watch

NOBODY = "no prefill instance is registered"


class BootstrapWatch:
    """The probes of one server. Ready means that decode can be served: instances are registered, and all are whole."""

    def __init__(self, server: BootstrapServer, events: Events) -> None:
        self._server = server
        self._events = events

    def serve(self, bind: str) -> Watch:
        """Serve them at `bind`. Raises as `Watch` does."""
        return Watch(bind, self._events, self.healthy, self.ready, self.tell_levels)

    def healthy(self) -> Answer:
        """Whether the service answers."""
        try:
            self._server.readiness()
        except (PartDead, DeadlineExceeded) as error:
            return Answer(False, (str(error),), {"bootstrap": str(error)})
        return Answer(True, (), {"bootstrap": ""})

    def ready(self) -> Answer:
        """Whether there are instances, and the layer plan of each has an owner for every layer."""
        try:
            instances = self._server.readiness()
        except (PartDead, DeadlineExceeded) as error:
            return Answer(False, (str(error),))
        reasons = tuple(text for text in instances.values() if text) if instances else (NOBODY,)
        return Answer(not reasons, reasons, {f"instance {name}": text for name, text in instances.items()})

    def tell_levels(self) -> None:
        """Emit what the gauges of the directory are set to."""
        try:
            instances = self._server.readiness()
        except (PartDead, DeadlineExceeded):
            instances = {}
        num_ready = sum(not text for text in instances.values())
        self._events.emit(
            "bootstrap.levels",
            num_workers=self._server.num_workers,
            num_ready=num_ready,
            num_not_ready=len(instances) - num_ready,
        )
