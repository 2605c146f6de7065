"""Owns what an engine says of one prefill rank, and what is worked out of it once, when the rank comes. It owns no
request and no connection.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdlink.backends.page_digests import PageDigests
from pdlink.bootstrap.messages import PROTOCOL, ProtocolRange
from pdlink.config import Settings
from pdlink.errors import LayoutError
from pdlink.layout.components import CacheLayout
from pdlink.layout.election import may_send_aux
from pdlink.layout.layer_plan import OwnedLayers, PlanKind
from pdlink.layout.parallel import ParallelSizes, RankCoordinates
from pdlink.layout.parts import part_of
from pdlink.layout.regions import Region, check_region
from pdlink.prefill.chunk import RankFacts


@dataclass(frozen=True)
class PrefillRank:
    """What an engine says of one prefill rank.

    `owned` and `regions` must agree: one region for each owned (component, layer), none for others; their memory stays
    mapped until the worker is closed. `kinds` says per component whether the instance splits or replicates it.
    """

    instance: str
    layout: CacheLayout
    sizes: ParallelSizes
    rank: RankCoordinates
    kinds: Mapping[str, PlanKind]
    owned: OwnedLayers
    regions: Sequence[Region]
    protocol: ProtocolRange = PROTOCOL
    incarnation: int = field(default_factory=time.time_ns)

    @property
    def worker_id(self) -> str:
        return f"{self.instance}/{self.rank}"


def facts_of(rank: PrefillRank, settings: Settings, digester: PageDigests) -> RankFacts:
    """What every request of the rank needs to know. Raises `LayoutError` where regions and owned layers disagree."""
    held: dict[tuple[str, int], Region] = {}
    for region in rank.regions:
        check_region(region, rank.layout)
        held[region.component, region.layer] = region
    for name, ids in rank.owned.items():
        missing = [layer for layer in ids if (name, layer) not in held]
        if missing:
            raise LayoutError(f"{rank.worker_id} owns {name!r} layers {missing} but gives no region for them")
    rank.sizes.check(rank.rank)
    return RankFacts(
        rank.worker_id,
        rank.incarnation,
        rank.layout,
        rank.owned,
        held,
        may_send_aux(rank.layout, rank.owned, rank.rank),
        settings.max_aux_bytes,
        settings.publication_lease_s,
        settings.liveness_timeout_s,
        digester.choose(settings.digest_kind, rank.regions) if settings.verify_digests else None,
        # Generations of two lives of a worker never meet, because each counts from somewhere else.
        itertools.count(secrets.randbits(62)),
        digester,
        {one.name: part_of(one, rank.rank.tp, rank.sizes.tp) for one in rank.layout.components},
    )
