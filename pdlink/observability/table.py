"""Owns the declaration of every metric: name, kind, unit, labels, help, and the event that feeds it. It counts nothing.

Names end in their base unit (seconds, bytes), and those of counters, and of no others, in `_total`. Events are those of
the core: what is said of a metric here is all that `metrics` knows of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

PREFIX = "pdlink_"
MAX_LABEL_VALUES = 64
"""Of one label of one metric. Whatever comes after that counts as `OTHER`."""
OTHER = "other"


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Label:
    """One label. Its value is the event's field `source`, or the text `constant`."""

    name: str
    source: str = ""
    constant: str = ""


@dataclass(frozen=True, slots=True)
class Feed:
    """The event that feeds a metric, and how: each adds the sum of its fields `values` (1 without any), a gauge is set
    to it. Only events count that have all of `only` as said (True: anything but empty or 0)."""

    event: str
    values: tuple[str, ...] = ()
    only: Mapping[str, str | bool] = field(default_factory=dict)
    labels: tuple[Label, ...] = ()


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. All feeds have the same labels. `buckets` are the upper bounds of a histogram, in its unit."""

    name: str
    kind: Kind
    unit: str
    help: str
    feeds: tuple[Feed, ...]
    buckets: tuple[float, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.feeds[0].labels)


SHORT = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
LONG = (1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_LINK = (Label("backend", "backend"), Label("way", "way"))
_READER = (Label("reader", "reader"),)


def _counter(name: str, unit: str, text: str, *feeds: Feed) -> Metric:
    return Metric(f"{PREFIX}{name}_total", Kind.COUNTER, unit, text, feeds)


def _seconds(name: str, text: str, feed: Feed, buckets: tuple[float, ...] = SHORT) -> Metric:
    return Metric(f"{PREFIX}{name}_seconds", Kind.HISTOGRAM, "seconds", text, (feed,), buckets)


def _gauge(name: str, text: str, *feeds: Feed) -> Metric:
    return Metric(f"{PREFIX}{name}", Kind.GAUGE, "", text, feeds)


def _levels(event: str, label: str, fields: Mapping[str, str]) -> tuple[Feed, ...]:
    """One feed for each value of a label: value -> field that has it."""
    return tuple(Feed(event, (source,), labels=(Label(label, constant=value),)) for value, source in fields.items())


TRANSFER_STATES = ("resolving", "subscribed", "pulling", "confirming", "draining")
PEER_STATES = ("linked", "connected", "dead")

METRICS: tuple[Metric, ...] = (
    # Decode: whole requests.
    _counter(
        "transfers",
        "",
        "Receives that ended, by their final state.",
        Feed("transfer.end", labels=(Label("state", "state"),)),
    ),
    _counter(
        "transfer_failures",
        "",
        "Receives that ended badly, by the reason of the first failure.",
        Feed("transfer.end", only={"reason": True}, labels=(Label("reason", "reason"),)),
    ),
    _seconds(
        "transfer",
        "Receives that succeeded, from the call to the last verdict.",
        Feed("transfer.end", ("elapsed_s",), {"state": "done"}),
        LONG,
    ),
    _seconds(
        "transfer_resolve",
        "Part of a receive that succeeded: finding the prefill instance.",
        Feed("transfer.end", ("resolve_s",), {"state": "done"}),
    ),
    _seconds(
        "transfer_wait",
        "Part of a receive that succeeded: from the subscribe to the first published page, prefill's work included.",
        Feed("transfer.end", ("wait_s",), {"state": "done"}),
        LONG,
    ),
    _seconds(
        "transfer_confirm",
        "Part of a receive that succeeded: from the last byte to the last verdict.",
        Feed("transfer.end", ("confirm_s",), {"state": "done"}),
    ),
    _gauge(
        "transfers_live",
        "Receives that run, by their state.",
        *_levels("node.levels", "state", {state: f"transfers_{state}" for state in TRANSFER_STATES}),
    ),
    # Decode: pulls.
    _counter(
        "transfer_bytes",
        "bytes",
        "Bytes of pages that landed on this decode side.",
        Feed("pull.end", ("num_bytes",), labels=_LINK),
    ),
    _counter("pulls", "", "Pulls that landed whole.", Feed("pull.end", only={"reason": ""}, labels=_LINK)),
    _counter(
        "pull_failures",
        "",
        "Pulls that went wrong or were stopped, by reason.",
        Feed("pull.end", only={"reason": True}, labels=(Label("backend", "backend"), Label("reason", "reason"))),
    ),
    _counter(
        "way_choices",
        "",
        "Choices of the way that a pull moves by.",
        Feed("pull.way", labels=_LINK),
    ),
    _counter(
        "pull_cells",
        "",
        "What pulls were asked to move before merging: pages x layers.",
        Feed("pull.end", ("num_cells",), labels=_LINK),
    ),
    _counter(
        "pull_descriptors",
        "",
        "What that was merged into for the direct way: ranges that lie together on both sides.",
        Feed("pull.end", ("num_descriptors",), labels=_LINK),
    ),
    _counter(
        "pull_posts", "", "Batches that were handed to transports.", Feed("pull.end", ("num_posted",), labels=_LINK)
    ),
    _seconds(
        "pull",
        "Pulls that landed whole, from their turn on their thread to the last byte in its page.",
        Feed("pull.end", ("took_s",), {"reason": ""}, _LINK),
    ),
    _seconds(
        "pull_wire",
        "Part of a pull: in the transport, posting included.",
        Feed("pull.end", ("post_s", "wire_s"), {"reason": ""}, _LINK),
    ),
    _seconds(
        "pull_pack",
        "Part of a staged pull: waiting for the owner to pack.",
        Feed("pull.end", ("pack_s",), {"reason": "", "way": "staged"}, (Label("backend", "backend"),)),
    ),
    _seconds(
        "pull_unpack",
        "Part of a staged pull: from staging slots to pages.",
        Feed("pull.end", ("unpack_s",), {"reason": "", "way": "staged"}, (Label("backend", "backend"),)),
    ),
    _seconds(
        "pull_verify",
        "Comparing the digests of one pull, where digests are on.",
        Feed("pull.end", ("verify_s",), {"verify_s": True}),
    ),
    _gauge(
        "pulls_in_flight",
        "Pulls that were handed to their threads and are not over.",
        Feed("node.levels", ("pulls_in_flight",)),
    ),
    _gauge(
        "pages_quarantined",
        "Destination pages of ended requests into which bytes may still land.",
        Feed("node.levels", ("pages_quarantined",)),
    ),
    _gauge(
        "peers",
        "Prefill ranks that this side knows: linked, connected over a transport, or with a dead thread.",
        *_levels("node.levels", "state", {state: f"peers_{state}" for state in PEER_STATES}),
    ),
    # Prefill.
    _counter(
        "requests",
        "",
        "Published requests that ended, by their final state.",
        Feed("request.end", labels=(Label("state", "state"),)),
    ),
    _counter(
        "published_bytes",
        "bytes",
        "Bytes of pages of this rank's layers that were published in requests that were released.",
        Feed("request.end", ("num_bytes",), {"state": "released"}),
    ),
    _counter(
        "request_failures",
        "",
        "Published requests that ended badly, by the reason of the first failure.",
        Feed("request.end", only={"reason": True}, labels=(Label("reason", "reason"),)),
    ),
    _seconds(
        "request",
        "Published requests that were released, from open to the last reader.",
        Feed("request.end", ("elapsed_s",), {"state": "released"}),
        LONG,
    ),
    _gauge("requests_open", "Requests that are open on prefill ranks.", Feed("node.levels", ("requests_open",))),
    _gauge(
        "publication_leases_held",
        "Requests whose published pages must stay as they are.",
        Feed("node.levels", ("leases_held",)),
    ),
    _counter(
        "publication_leases_expired",
        "",
        "Requests that ended because nobody came for their pages, or a reader fell silent.",
        Feed("request.end", only={"state": "expired"}),
    ),
    # Handshakes and strangers, on either side and in the directory.
    _counter(
        "handshake_refusals",
        "",
        "Peers that do not fit, by the first field that differs.",
        Feed(
            "bootstrap.refused",
            only={"field": True},
            labels=(Label("at", constant="bootstrap"), Label("field", "field")),
        ),
        Feed(
            "transfer.refused", only={"field": True}, labels=(Label("at", constant="prefill"), Label("field", "field"))
        ),
    ),
    _counter(
        "subscribe_refusals",
        "",
        "Subscribes that a prefill rank refused, by reason.",
        Feed("transfer.refused", labels=(Label("reason", "reason"),)),
    ),
    _counter(
        "denials",
        "",
        "Callers without the right credentials, by reason.",
        Feed("bootstrap.denied", labels=(Label("at", constant="bootstrap"), Label("reason", "reason"))),
        Feed("control.denied", labels=(Label("at", constant="control"), Label("reason", "reason"))),
    ),
    _counter(
        "control_frames_unusable",
        "",
        "Control frames that were malformed, unexpected, or about no live request.",
        Feed("control.malformed", labels=(Label("fault", constant="malformed"),)),
        Feed("control.unexpected", labels=(Label("fault", constant="unexpected"),)),
        Feed("control.stray", labels=(Label("fault", constant="stray"),)),
    ),
    # The directory, and registrations with it.
    _gauge("registered_workers", "Prefill ranks that the bootstrap lists.", Feed("bootstrap.levels", ("num_workers",))),
    _gauge(
        "instances",
        "Prefill instances that the bootstrap lists, by whether their layer plans are whole.",
        *_levels("bootstrap.levels", "state", {"ready": "num_ready", "not_ready": "num_not_ready"}),
    ),
    _counter("registrations", "", "Registrations that changed the directory.", Feed("bootstrap.registered")),
    _counter("withdrawals", "", "Prefill ranks that withdrew from the directory.", Feed("bootstrap.withdrawn")),
    _counter(
        "registration_leases_expired",
        "",
        "Prefill ranks that were dropped because they did not renew.",
        Feed("bootstrap.expired"),
    ),
    # The pool.
    _counter("layer_reads", "", "Reads of layers through the pool.", Feed("pool.stats", ("num_reads",))),
    _counter("scratch_hits", "", "Reads of layers that scratch held already.", Feed("pool.stats", ("num_hits",))),
    _counter(
        "layer_fetch_bytes",
        "bytes",
        "Bytes that reads of other ranks' layers moved.",
        Feed("pool.stats", ("num_bytes",)),
    ),
    _seconds(
        "layer_fetch",
        "Bringing one layer of another rank, by reader (broadcast, peer); on a device until it is on the stream.",
        Feed("pool.fetch", ("took_s",), labels=_READER),
    ),
    # The sidecar.
    _gauge("sidecar_engines", "Engines that this sidecar serves.", Feed("sidecar.levels", ("num_engines",))),
    _counter(
        "sidecar_engines_started",
        "",
        "Processes that this sidecar started for engines.",
        Feed("sidecar.engine_started"),
    ),
    _counter(
        "sidecar_engines_ended",
        "",
        "Processes for engines that ended: in order, or killed or in trouble.",
        Feed("sidecar.engine_ended", labels=(Label("how", "how"),)),
    ),
    # The process.
    _counter("threads_died", "", "Background threads that ended unasked.", Feed("thread.died")),
    _gauge(
        "healthy",
        "1 while every part of this process has all its threads, else 0.",
        Feed("process.levels", ("healthy",)),
    ),
    _gauge("ready", "1 while this process can serve, as /readyz says, else 0.", Feed("process.levels", ("ready",))),
)
