"""Owns the overview of one request between two whole instances: who pulls how much from whom, and how even that is.

What each decode rank pulls is decided in `pairs`; here it is only counted, without addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pdlink.layout.components import CacheLayout
from pdlink.layout.decode_plan import DecodePlan, DecodeRank
from pdlink.layout.layer_plan import LayerPlan
from pdlink.layout.parallel import RankCoordinates
from pdlink.transfer.pairs import Share, holders_of, shares_of


@dataclass(frozen=True, slots=True)
class Pull:
    """All that one decode rank pulls from one prefill rank for one request.

    `layers` and `heads` are per component; `heads` has components of which less than all heads come, as [first, end).
    `num_descriptors` is of the direct way, where no two pages are neighbours.
    """

    source: RankCoordinates
    reader: DecodeRank
    layers: Mapping[str, tuple[int, ...]]
    heads: Mapping[str, tuple[int, int]]
    nbytes: int
    num_descriptors: int

    @property
    def what(self) -> tuple[object, ...]:
        """Equal for readers that pull the same from the same rank."""
        layers, heads = tuple(self.layers.items()), tuple(self.heads.items())
        return self.source, layers, heads, self.nbytes, self.num_descriptors


@dataclass(frozen=True)
class PairTable:
    """The pulls of one request by prefill rank, then decode rank; of one dp group, which stands for all.

    `num_pages` is per page group of prefill. `nbytes_of_source` and `nbytes_of_reader` have every rank of the group,
    those that give or take nothing as well.
    """

    num_tokens: int
    num_pages: Mapping[str, int]
    pulls: tuple[Pull, ...]
    nbytes_of_source: Mapping[RankCoordinates, int] = field(default_factory=dict)
    nbytes_of_reader: Mapping[DecodeRank, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.pulls)

    @property
    def num_descriptors(self) -> int:
        return sum(one.num_descriptors for one in self.pulls)

    @property
    def source_imbalance(self) -> float:
        """What the busiest prefill rank gives, over the mean of all; 1 is even."""
        return _imbalance(self.nbytes_of_source.values())

    @property
    def reader_imbalance(self) -> float:
        """What the busiest decode rank takes, over the mean of all; 1 is even."""
        return _imbalance(self.nbytes_of_reader.values())

    def alike(self) -> list[tuple[Pull, tuple[DecodeRank, ...]]]:
        """Each different pull once, with the decode ranks that make it; by prefill rank."""
        found: dict[tuple[object, ...], list[Pull]] = {}
        for one in self.pulls:
            found.setdefault(one.what, []).append(one)
        return [(pulls[0], tuple(one.reader for one in pulls)) for pulls in found.values()]


def tabulate(
    sources: Sequence[CacheLayout],
    plan: LayerPlan,
    decode: DecodePlan,
    destination_of: Callable[[DecodeRank], CacheLayout],
    num_tokens: int,
) -> PairTable:
    """The table for a request of `num_tokens` tokens; `sources` are the layouts of prefill's tp ranks, or one for all,
    and `destination_of` that of a decode rank's own pages.

    Raises `PlanError` and `LayoutError` with why the two instances do not fit.
    """
    source = sources[0]
    groups = {group.name: group.num_pages(num_tokens) for group in source.page_groups}
    num_pages = {one.name: groups[one.page_group] for one in source.components}
    holders = holders_of(sources, plan)
    readers = [one for one in decode.sizes.ranks() if one.dp == 0]
    pulls = []
    for reader in readers:
        destination = destination_of(reader)
        place = decode.place(reader)
        parts = place.parts(destination)
        for share in shares_of(source, holders, destination, place):
            wanted = {name: part.heads(destination.component(name).model_heads) for name, part in parts.items()}
            pulls.append(_pull(source, share, wanted, num_pages))
    pulls.sort(key=lambda one: (one.source, one.reader))
    return PairTable(
        num_tokens,
        groups,
        tuple(pulls),
        {rank: sum(one.nbytes for one in pulls if one.source == rank) for rank in holders},
        {rank: sum(one.nbytes for one in pulls if one.reader == rank) for rank in readers},
    )


def _pull(source: CacheLayout, share: Share, wanted: Mapping[str, range], num_pages: Mapping[str, int]) -> Pull:
    heads = {}
    for route in share.routes:
        total = source.component(route.component).model_heads
        held, mine = route.part.heads(total), wanted[route.component]
        first, end = max(held.start, mine.start), min(held.stop, mine.stop)
        if end - first < total:
            heads[route.component] = (first, end)
    return Pull(
        share.source, share.reader, share.layers, heads, share.nbytes(num_pages), share.num_descriptors(num_pages)
    )


def _imbalance(values: Iterable[int]) -> float:
    loads: Sequence[int] = list(values)
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0
