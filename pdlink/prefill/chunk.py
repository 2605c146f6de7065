"""Owns one call of `publish` as a checked value, and the facts of its rank that decide. It sends nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pdlink.errors import InvalidInput
from pdlink.layout.components import CacheLayout
from pdlink.layout.layer_plan import OwnedLayers
from pdlink.layout.parts import Part
from pdlink.layout.regions import Region
from pdlink.prefill.publication import Parts, Publication
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.digests import Digester, DigestKind, DigestTable, cells_in_order, page_digests

MAX_PAGES_PER_FRAME = 1 << 16
MAX_PAGE_POSITION = 1 << 31
MAX_DIGESTS_PER_FRAME = 1 << 18


@dataclass(frozen=True)
class RankFacts:
    """What a sender needs to know of its rank; the same value for every request of a worker."""

    worker_id: str
    incarnation: int
    layout: CacheLayout
    owned: OwnedLayers
    regions: Mapping[tuple[str, int], Region]
    is_aux_owner: bool
    max_aux_bytes: int
    lease_s: float
    liveness_s: float
    digest_kind: DigestKind | None
    """Of the digests that it makes, if any."""
    generations: itertools.count[int]
    digest: Digester = page_digests
    parts: Mapping[str, Part] = field(default_factory=dict)
    """What its pages hold of each component of the layout."""

    @cached_property
    def least_pages(self) -> int:
        """Of its regions, the pages of the smallest."""
        return min((region.num_pages for region in self.regions.values()), default=0)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Pages (int64 [n]) at positions [start_page, stop_page) of a prompt, in `layers` of one page group."""

    group: str
    page_ids: Int64Array
    start_page: int
    layers: Mapping[str, tuple[int, ...]]
    last: bool
    aux: bytes | None

    @property
    def stop_page(self) -> int:
        return self.start_page + len(self.page_ids)

    def has_any(self, group: str, pages: Int64Array) -> bool:
        return self.group == group and bool(np.isin(self.page_ids, pages).any())

    def digests(self, rank: RankFacts) -> DigestTable | None:
        """A row for each (component, layer), where the rank makes digests. Reads every page, so it takes a while.

        Raises `BackendError` when a device cannot be read.
        """
        if not rank.digest_kind or not len(self.page_ids) or not self.layers:
            return None
        regions = [rank.regions[cell] for cell in cells_in_order(self.layers)]
        return DigestTable(rank.digest_kind, rank.digest(rank.digest_kind, regions, self.page_ids))

    def publications(
        self, rank: RankFacts, sequence: int, digests: Mapping[Parts, DigestTable]
    ) -> Iterator[Publication]:
        """As many as their frames need to stay within bounds, numbered from `sequence`; the last of them ends."""
        num_rows = max((len(table.values) for table in digests.values()), default=0)
        step = max(1, min(MAX_PAGES_PER_FRAME, MAX_DIGESTS_PER_FRAME // max(1, num_rows)))
        cuts = range(0, max(1, len(self.page_ids)), step)
        for number, cut in enumerate(cuts):
            ids = self.page_ids[cut : cut + step].copy()
            ends = self.last and cut == cuts[-1]
            yield Publication(
                sequence + number,
                self.group,
                self.start_page + cut,
                ids,
                self.layers if len(ids) else {},
                next(rank.generations),
                ends,
                self.aux if ends and rank.is_aux_owner else None,
                {
                    parts: table.part(range(len(table.values)), slice(cut, cut + step))
                    for parts, table in digests.items()
                },
            )


def build_chunk(
    rank: RankFacts,
    transfer_id: str,
    group: str,
    page_ids: Sequence[int] | Int64Array,
    start_page: int,
    layers: Mapping[str, Iterable[int]] | None,
    last: bool,
    aux: bytes | None,
) -> Chunk:
    """Check an engine's call. Raises `InvalidInput` for pages or layers that this rank does not have, or bad aux."""
    pages = np.array(page_ids, dtype=np.int64).reshape(-1)
    chosen = _layers(rank, group, layers)
    if aux is not None and not last:
        raise InvalidInput(f"transfer {transfer_id!r}: aux goes with the last publish")
    if aux is not None and len(aux) > rank.max_aux_bytes:
        raise InvalidInput(f"aux of {len(aux)} bytes is over the limit of {rank.max_aux_bytes}")
    if not 0 <= start_page <= MAX_PAGE_POSITION - len(pages):
        raise InvalidInput(
            f"transfer {transfer_id!r} publishes page positions [{start_page}, {start_page + len(pages)}) of group "
            f"{group!r}; they begin at 0 and end below {MAX_PAGE_POSITION}"
        )
    low, high = (int(pages.min()), int(pages.max())) if len(pages) else (0, -1)
    if low < 0 or high >= rank.least_pages:
        limits = [(rank.regions[name, layer].num_pages, name, layer) for name in chosen for layer in chosen[name]]
        limit, name, layer = min(limits, default=(MAX_PAGE_POSITION, "", 0))
        if low < 0 or high >= limit:
            raise InvalidInput(
                f"transfer {transfer_id!r} publishes pages {low}..{high} of a pool of {limit} pages ({name!r} layer "
                f"{layer})"
            )
    return Chunk(group, pages, start_page, chosen, last, aux)


def _layers(rank: RankFacts, group: str, layers: Mapping[str, Iterable[int]] | None) -> dict[str, tuple[int, ...]]:
    members = rank.layout.page_group(group).components
    mine = {name: rank.owned.get(name, ()) for name in members}
    if layers is None:
        return {name: ids for name, ids in mine.items() if ids}
    chosen = {name: tuple(sorted(set(ids))) for name, ids in layers.items()}
    for name, ids in chosen.items():
        strange = sorted(set(ids) - set(mine.get(name, ())))
        if strange:
            raise InvalidInput(
                f"{rank.worker_id} cannot publish {name!r} layers {strange} in page group {group!r}; it owns "
                f"{list(mine.get(name, ()))}"
            )
    return {name: ids for name, ids in chosen.items() if ids}
