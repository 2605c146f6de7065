"""Owns the registrations that the bootstrap tests share. Small layouts, made-up addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdlink.address import Address
from pdlink.bootstrap.messages import PROTOCOL, ProtocolRange, RankInfo, Registration
from pdlink.layout import (
    CacheLayout,
    LayerPlan,
    OwnedLayers,
    ParallelSizes,
    PlanKind,
    RankCoordinates,
    Region,
    fingerprint,
)
from pdlink.layout.components import index_k, latent

SPACING = 1 << 32


def make_layout(num_layers: int = 4, page_size: int = 64, latent_bytes: int = 656) -> CacheLayout:
    return CacheLayout(
        num_layers,
        (
            latent(page_size, range(num_layers), bytes_per_token=latent_bytes),
            index_k(page_size, range(num_layers)),
        ),
    )


def make_regions(layout: CacheLayout, owned: OwnedLayers, num_pages: int = 128) -> tuple[Region, ...]:
    """One dense region for each owned layer."""
    regions = []
    for name, layers in owned.items():
        nbytes = layout.component(name).page_bytes
        regions += [Region(name, layer, SPACING * (layer + 1), nbytes, nbytes, num_pages) for layer in layers]
    return tuple(regions)


def make_rank(
    layout: CacheLayout,
    rank: RankCoordinates,
    owned: OwnedLayers,
    worker_id: str,
    *,
    incarnation: int = 1,
    num_pages: int = 128,
    transports: Mapping[str, bytes] | None = None,
) -> RankInfo:
    return RankInfo(
        worker_id,
        incarnation,
        rank,
        owned,
        make_regions(layout, owned, num_pages),
        Address("127.0.0.1", 9000 + rank.cp),
        {"ipc": b"hello"} if transports is None else transports,
    )


def make_instance(
    layout: CacheLayout | None = None,
    sizes: ParallelSizes | None = None,
    *,
    instance: str = "prefill-a",
    kind: PlanKind = PlanKind.SPLIT,
    protocol: ProtocolRange = PROTOCOL,
    incarnation: int = 1,
    owned: Mapping[int, OwnedLayers] | None = None,
    num_pages: int = 128,
) -> list[Registration]:
    """One registration for each rank, worker w0, w1, ...; `owned` replaces the balanced share of some ranks."""
    layout = layout or make_layout()
    sizes = sizes or ParallelSizes(cp=2)
    plan = LayerPlan.balanced(layout, sizes, kind)
    shares = [(owned or {}).get(index, share) for index, share in enumerate(plan.owned.values())]
    return [
        Registration(
            instance,
            protocol,
            layout,
            sizes,
            plan.kinds,
            make_rank(layout, rank, share, f"w{index}", incarnation=incarnation, num_pages=num_pages),
        )
        for index, (rank, share) in enumerate(zip(plan.owned, shares, strict=True))
    ]


def uneven_ranks(layouts: Sequence[CacheLayout], cp: int = 1) -> list[Registration]:
    """One registration for each rank of an instance whose tp ranks have pages of their own."""
    sizes = ParallelSizes(cp=cp, tp=len(layouts))
    plan = LayerPlan.balanced(layouts[0], sizes)
    made = []
    for number, (rank, owned) in enumerate(plan.owned.items()):
        layout = layouts[rank.tp]
        info = make_rank(layout, rank, owned, f"w{number}")
        made.append(Registration("prefill-a", PROTOCOL, layout, sizes, plan.kinds, info))
    return made


PRINT = fingerprint(make_layout())
