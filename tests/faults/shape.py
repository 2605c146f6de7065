"""Owns what the processes of a fault test agree on: what is cached, and the deadlines, which are shorter than usual."""

from __future__ import annotations

import dataclasses

from pdlink.address import Address
from pdlink.bootstrap.messages import Registration
from pdlink.layout.components import CacheLayout, index_k, latent
from pdlink.prefill.worker import PrefillWorker

PAGE_SIZE = 16
NUM_LAYERS = 4
NUM_PAGES = 96

SETTINGS: dict[str, object] = {
    "resolve_timeout_s": 3.0,
    "connect_timeout_s": 4.0,
    "subscribe_timeout_s": 6.0,
    "first_page_timeout_s": 8.0,
    "progress_timeout_s": 6.0,
    "transfer_timeout_s": 13.0,
    "confirm_timeout_s": 5.0,
    "abort_ack_timeout_s": 0.3,
    "liveness_timeout_s": 2.5,
    "keepalive_interval_s": 0.2,
    "drain_timeout_s": 1.5,
    "staging_timeout_s": 3.0,
    "staging_slot_bytes": 256 << 10,
    "staging_slots": 8,
    "resend_interval_s": 0.1,
    "publication_lease_s": 5.0,
    "registration_lease_s": 2.0,
    "verdict_ttl_s": 5.0,
}

VERDICT_DEADLINE_S = 30.0
"""The whole transfer, its drain and the goodbye: by then every request has its terminal state, whatever happened."""
RECOVERY_DEADLINE_S = 40.0
"""From the end of the damage until a request that began after it succeeds: restarts, leases and reconnects included."""
WHOLE_DEADLINE_S = 60.0
"""Until a cluster is proven whole: restarts of who died of the damage later than the others included."""
LEAK_DEADLINE_S = 30.0
"""Until a process holds no more than the most that it has held at rest: longer than any lease and gRPC's own timers."""


def make_layout() -> CacheLayout:
    layers = range(NUM_LAYERS)
    return CacheLayout(NUM_LAYERS, (latent(PAGE_SIZE, layers, bytes_per_token=656), index_k(PAGE_SIZE, layers)))


def through_middleman(worker: PrefillWorker, address: Address) -> None:
    """Have the worker tell peers to find it at `address`, where somebody forwards to it."""
    own = worker.registration

    def registration() -> Registration:
        said = own()
        return dataclasses.replace(said, rank=dataclasses.replace(said.rank, control_endpoint=address))

    worker.registration = registration  # type: ignore[method-assign]
