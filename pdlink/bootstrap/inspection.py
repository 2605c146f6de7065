"""Owns what operators see of a directory: every instance, whole or not, and its live workers. Values only.

No key and no address of memory is among it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdlink.address import Address
from pdlink.bootstrap.messages import ProtocolRange, Registration
from pdlink.layout import CacheLayout, OwnedLayers, ParallelSizes, PlanKind, RankCoordinates


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One live worker. `lease_left_s` is when it would be dropped, were it not renewed."""

    worker_id: str
    incarnation: int
    coordinates: RankCoordinates
    owned: OwnedLayers
    control_endpoint: Address
    transports: tuple[str, ...]
    num_staging_slots: int
    staging_slot_bytes: int
    has_control_keys: bool
    lease_left_s: float

    @classmethod
    def of(cls, registration: Registration, lease_left_s: float) -> WorkerView:
        rank = registration.rank
        return cls(
            rank.worker_id,
            rank.incarnation,
            rank.coordinates,
            rank.owned,
            rank.control_endpoint,
            tuple(rank.transports),
            rank.staging.num_slots if rank.staging else 0,
            rank.staging.slot_bytes if rank.staging else 0,
            rank.control_keys is not None,
            lease_left_s,
        )


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One instance. `not_ready` is what keeps its layer plans from being whole ("": nothing). Workers in rank order."""

    name: str
    version: int
    not_ready: str
    protocol: ProtocolRange
    layout: CacheLayout
    sizes: ParallelSizes
    kinds: Mapping[str, PlanKind]
    workers: tuple[WorkerView, ...]

    def owners(self, component: str) -> dict[int, list[str]]:
        """Global layer id -> the live workers that own it, of dp group and tp rank 0: one shard group a stage."""
        owners: dict[int, list[str]] = {layer: [] for layer in self.layout.component(component).layers}
        for worker in self.workers:
            if worker.coordinates.dp or worker.coordinates.tp:
                continue
            for layer in worker.owned.get(component, ()):
                owners.setdefault(layer, []).append(worker.worker_id)
        return owners


@dataclass(frozen=True, slots=True)
class DirectoryView:
    """Everything that one bootstrap lists, and how long a lease is."""

    instances: tuple[InstanceView, ...]
    lease_s: float
