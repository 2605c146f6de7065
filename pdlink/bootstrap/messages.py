"""Owns the values that the bootstrap service keeps and answers, and their checks. It knows no wire and no clock.

`Registration` is what one prefill rank says of itself; `PrefillServerInfo` is what decode learns of an instance.
Everything is frozen and checked when built, so that a value that exists is usable whatever sent it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from pdlink.address import Address
from pdlink.bootstrap.control_keys import ControlKeys
from pdlink.errors import InvalidInput, LayoutError
from pdlink.layout import (
    CacheLayout,
    Fingerprint,
    LayerPlan,
    OwnedLayers,
    ParallelSizes,
    PlanKind,
    RankCoordinates,
    Region,
    check_region,
    fingerprint,
    part_of,
)
from pdlink.layout.staging import StagingArea

MAX_NAME_CHARS = 256
MAX_RANKS = 65_536
MAX_TRANSPORTS = 16
MAX_TRANSPORT_BYTES = 256 << 10
MAX_INCARNATION = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class ProtocolRange:
    """Protocol versions that one side speaks, both ends included. Raises `InvalidInput`."""

    least: int
    greatest: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.greatest <= 0xFFFF:
            raise InvalidInput(f"protocol range {self.least}..{self.greatest} must rise from at least 1")

    def agree(self, other: ProtocolRange) -> int | None:
        """The newest version that both speak, or None."""
        newest = min(self.greatest, other.greatest)
        return newest if newest >= max(self.least, other.least) else None

    def __str__(self) -> str:
        return str(self.least) if self.least == self.greatest else f"{self.least}..{self.greatest}"


PROTOCOL = ProtocolRange(1, 1)
"""What this build speaks."""


@dataclass(frozen=True, slots=True)
class Side:
    """What one end says of itself before anything else is looked at."""

    protocol: ProtocolRange
    fingerprint: Fingerprint

    @classmethod
    def of(cls, layout: CacheLayout, protocol: ProtocolRange = PROTOCOL) -> Side:
        return cls(protocol, fingerprint(layout))


@dataclass(frozen=True, slots=True)
class WorkerKey:
    """The name of one registration: a worker of an instance, in one life (`incarnation`) of its process."""

    instance: str
    worker_id: str
    incarnation: int

    def __post_init__(self) -> None:
        check_name("instance", self.instance)
        check_name("worker_id", self.worker_id)
        _check_incarnation(self.worker_id, self.incarnation)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the control socket of one live rank is, and the keys to it where it demands some."""

    worker_id: str
    incarnation: int
    coordinates: RankCoordinates
    control_endpoint: Address
    control_keys: ControlKeys | None = None

    def __post_init__(self) -> None:
        check_name("worker_id", self.worker_id)
        _check_incarnation(self.worker_id, self.incarnation)
        check_endpoint(self.worker_id, self.control_endpoint)


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One prefill rank: who it is, which layers it owns, where their pages lie and how it is reached.

    `incarnation` is new at every process start and grows (`time.time_ns()` then). Regions name owned layers only:
    for each component all of them, or none where the memory is not registered with any transport. `transports` has
    one opaque blob per transport, at most `MAX_TRANSPORT_BYTES` each. `staging` is None where nothing is packed, and
    `control_keys` where control frames are plain. `staged_only` names the transports over which the staging slots can
    be read, and no page. Owned layers and regions are kept in order.
    Raises `InvalidInput` naming the worker and the field.
    """

    worker_id: str
    incarnation: int
    coordinates: RankCoordinates
    owned: OwnedLayers
    regions: tuple[Region, ...]
    control_endpoint: Address
    transports: Mapping[str, bytes]
    staging: StagingArea | None = None
    control_keys: ControlKeys | None = None
    staged_only: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        check_name("worker_id", self.worker_id)
        _check_incarnation(self.worker_id, self.incarnation)
        check_endpoint(self.worker_id, self.control_endpoint)
        _check_transports(self.worker_id, self.transports)
        _check_owned(self.worker_id, self.owned)
        regions = tuple(sorted(self.regions, key=lambda one: (one.component, one.layer)))
        object.__setattr__(self, "owned", {name: tuple(self.owned[name]) for name in sorted(self.owned)})
        object.__setattr__(self, "regions", regions)
        object.__setattr__(self, "transports", {name: self.transports[name] for name in sorted(self.transports)})
        _check_regions_owned(self)

    @property
    def owns_nothing(self) -> bool:
        return not any(self.owned.values())

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.worker_id, self.incarnation, self.coordinates, self.control_endpoint, self.control_keys)


@dataclass(frozen=True, slots=True)
class Registration:
    """What one rank registers: itself, and what all ranks of its instance must say alike.

    Raises `InvalidInput` (or `LayoutError`) naming the worker and the field.
    """

    instance: str
    protocol: ProtocolRange
    layout: CacheLayout
    sizes: ParallelSizes
    kinds: Mapping[str, PlanKind]
    rank: RankInfo

    def __post_init__(self) -> None:
        check_name("instance", self.instance)
        _check_body(self.layout, self.sizes, self.kinds)
        object.__setattr__(self, "kinds", {name: self.kinds[name] for name in sorted(self.kinds)})
        _check_rank(self.rank, self.layout, self.sizes)

    @property
    def key(self) -> WorkerKey:
        return WorkerKey(self.instance, self.rank.worker_id, self.rank.incarnation)


@dataclass(frozen=True)
class PrefillServerInfo:
    """A prefill instance as decode sees it. `ranks` are in order of their coordinates.

    Building one checks every rank and that no two share a name or a place; whether the plan is whole is
    `compat.check_body`'s to say. `version` changes whenever the service's view of the instance does. `tp_layouts` has
    the layout of each tp rank where they are not all `layout`, because heads are split unevenly; `layout` is the first.
    """

    instance: str
    protocol: ProtocolRange
    layout: CacheLayout
    fingerprint: Fingerprint
    sizes: ParallelSizes
    kinds: Mapping[str, PlanKind]
    ranks: tuple[RankInfo, ...]
    version: int = 0
    tp_layouts: tuple[CacheLayout, ...] = ()

    def __post_init__(self) -> None:
        check_name("instance", self.instance)
        _check_body(self.layout, self.sizes, self.kinds)
        if self.tp_layouts and (len(self.tp_layouts) != self.sizes.tp or self.tp_layouts[0] != self.layout):
            raise InvalidInput(
                f"instance {self.instance!r} has {len(self.tp_layouts)} layouts for tp={self.sizes.tp}, of which the "
                "first must be its layout"
            )
        if any(self.fingerprint != fingerprint(one) for one in {self.layout, *self.tp_layouts}):
            raise InvalidInput(f"fingerprint of instance {self.instance!r} does not describe its layout")
        object.__setattr__(self, "kinds", {name: self.kinds[name] for name in sorted(self.kinds)})
        object.__setattr__(self, "ranks", tuple(sorted(self.ranks, key=lambda one: one.coordinates)))
        for one in self.ranks:
            self.sizes.check(one.coordinates)
            _check_rank(one, self.layout_of(one.coordinates.tp), self.sizes)
        _check_unique("worker_id", self.instance, [one.worker_id for one in self.ranks])
        _check_unique("rank", self.instance, [str(one.coordinates) for one in self.ranks])

    @property
    def side(self) -> Side:
        return Side(self.protocol, self.fingerprint)

    @property
    def is_split(self) -> bool:
        """Whether any component is split over the ranks of a shard group."""
        return PlanKind.SPLIT in self.kinds.values()

    def layout_of(self, tp: int) -> CacheLayout:
        """What pages of that tp rank look like."""
        return self.tp_layouts[tp] if self.tp_layouts else self.layout

    def layer_plan(self) -> LayerPlan:
        """Who owns which layer; built once."""
        return self._plan

    def rank(self, worker_id: str) -> RankInfo:
        """The rank of that name; `InvalidInput` when the instance has none."""
        try:
            return self._by_worker[worker_id]
        except KeyError:
            raise InvalidInput(f"instance {self.instance!r} has no worker {worker_id!r}") from None

    @cached_property
    def _plan(self) -> LayerPlan:
        return LayerPlan(self.sizes, self.kinds, {one.coordinates: one.owned for one in self.ranks})

    @cached_property
    def _by_worker(self) -> dict[str, RankInfo]:
        return {one.worker_id: one for one in self.ranks}


def check_name(field: str, value: str) -> None:
    """Names are printable and bounded, because they end in logs and tables."""
    if not value or len(value) > MAX_NAME_CHARS or not value.isprintable():
        shown = value[:40] + "..." if len(value) > 40 else value
        raise InvalidInput(f"{field} {shown!r} must be 1..{MAX_NAME_CHARS} printable characters, got {len(value)}")


def check_endpoint(worker_id: str, address: Address) -> None:
    if address.is_wildcard or address.port == 0:
        raise InvalidInput(
            f"control_endpoint {address} of worker {worker_id!r} is not an address that peers can reach; bind one "
            "interface, or set PDLINK_ADVERTISE_HOST"
        )


def _check_incarnation(worker_id: str, incarnation: int) -> None:
    if not 1 <= incarnation <= MAX_INCARNATION:
        raise InvalidInput(f"incarnation {incarnation} of worker {worker_id!r} is outside 1..{MAX_INCARNATION}")


def _check_transports(worker_id: str, transports: Mapping[str, bytes]) -> None:
    if len(transports) > MAX_TRANSPORTS:
        raise InvalidInput(f"worker {worker_id!r} offers {len(transports)} transports; at most {MAX_TRANSPORTS}")
    for name, data in transports.items():
        check_name(f"transport of worker {worker_id!r}", name)
        if len(data) > MAX_TRANSPORT_BYTES:
            raise InvalidInput(
                f"transport {name!r} of worker {worker_id!r} has {len(data)} bytes; at most {MAX_TRANSPORT_BYTES}"
            )


def _check_owned(worker_id: str, owned: OwnedLayers) -> None:
    for name, layers in owned.items():
        if any(b <= a for a, b in itertools.pairwise(layers)):
            raise LayoutError(f"worker {worker_id!r} owns {name!r} layers {list(layers)}, which do not increase")


def _check_regions_owned(rank: RankInfo) -> None:
    held: dict[str, list[int]] = {}
    for region in rank.regions:
        held.setdefault(region.component, []).append(region.layer)
    for name, layers in held.items():
        owned = rank.owned.get(name, ())
        if tuple(layers) != owned:
            raise LayoutError(
                f"worker {rank.worker_id!r} has regions of {name!r} layers {layers} and owns layers {list(owned)}; "
                "give one region for each owned layer, or none of the component"
            )


def _check_body(layout: CacheLayout, sizes: ParallelSizes, kinds: Mapping[str, PlanKind]) -> None:
    if sizes.num_ranks > MAX_RANKS:
        raise InvalidInput(f"parallel sizes {sizes} make {sizes.num_ranks} ranks; at most {MAX_RANKS}")
    names = {one.name for one in layout.components}
    if set(kinds) != names:
        raise InvalidInput(f"plan kinds are stated for {sorted(kinds)}; the layout has components {sorted(names)}")


def _check_rank(rank: RankInfo, layout: CacheLayout, sizes: ParallelSizes) -> None:
    try:
        sizes.check(rank.coordinates)
        for component in layout.components:
            part_of(component, rank.coordinates.tp, sizes.tp)  # which refuses heads that do not come out
        for name, layers in rank.owned.items():
            strange = set(layers).difference(layout.component(name).layers)
            if strange:
                raise LayoutError(f"it owns {name!r} layers {sorted(strange)} that the layout lacks")
        for region in rank.regions:
            check_region(region, layout)
    except LayoutError as error:
        raise LayoutError(f"worker {rank.worker_id!r}: {error}") from error


def _check_unique(field: str, instance: str, values: list[str]) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise InvalidInput(f"instance {instance!r} has {field} {value!r} twice")
        seen.add(value)
