"""Owns random topologies: a model, a prefill instance and a decode instance that caches the same, and a request."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from pdlink.layout import (
    CacheLayout,
    Component,
    DecodePlan,
    DecodeSizes,
    Field,
    LayerPlan,
    ParallelSizes,
    PlanKind,
    RankCoordinates,
    balanced_ranges,
)
from pdlink.layout.components import DRAFT_PREFIX, index_k, latent
from pdlink.transfer.digests import DigestKind

HEADS = 24
"""Ranks in {1, 2, 3, 4, 8} split them evenly."""
PAGE_SIZES = (1, 2, 4, 8)
LAYERS = (1, 1, 3, 3, 3, 10, 10, 61, 78)
RANKS = (1, 1, 2, 2, 3, 4, 8)
MOST_RANKS = 12
MOST_LAYERS = 400
"""Of all ranks together, each counted with all that it might hold: what one example may cost."""


@dataclass(frozen=True)
class Topology:
    """Two instances of one model, each with its own layout."""

    prefills: tuple[CacheLayout, ...]
    """By tp rank of prefill."""
    plan: LayerPlan
    decodes: tuple[CacheLayout, ...]
    """By tp rank of decode."""
    taken: DecodePlan
    gap: int = 0

    @property
    def prefill(self) -> CacheLayout:
        return self.prefills[0]

    @property
    def decode(self) -> CacheLayout:
        return self.decodes[0]

    def __str__(self) -> str:
        return f"{self.plan.sizes} -> {self.taken.sizes}, {self.prefill.num_layers} layers"


@dataclass(frozen=True)
class Ask:
    """One request: its tokens, the prefix that decode has, the seed of everything else, and the prefill dp group."""

    num_tokens: int
    prefix_tokens: int
    dp: int
    seed: int


Shape = tuple[str, bool, int]


@dataclass(frozen=True)
class Case:
    topology: Topology
    asks: tuple[Ask, ...]
    way: str = "direct"
    digest_kind: str = ""
    """Of page digests; none are made where it is empty."""


def by_heads(name: str, page_size: int, layers: Sequence[int], num_heads: int, shape: Shape) -> Component:
    """Pages of some of the heads: of one field or two, tokens or heads outermost, with or without a gap."""
    fields, heads_first, gap = shape
    offset, made = 0, []
    for one, nbytes in (("x", 2), ("s", 1))[: 2 if fields == "two" else 1]:
        strides = (nbytes, page_size * nbytes) if heads_first else (num_heads * nbytes, nbytes)
        made.append(Field(one, offset, nbytes, strides[0], num_heads, strides[1] if num_heads > 1 else 0))
        offset = made[-1].end(page_size) + gap
    return Component(name, "bfloat16", page_size, offset, tuple(layers), tuple(made), "kv", HEADS)


@st.composite
def layouts(
    draw: st.DrawFn, held: tuple[tuple[int, ...], tuple[int, ...]], dcp: int, num_layers: int
) -> list[list[CacheLayout]]:
    """The layouts of both sides by tp rank, which have `held` heads; a model without heads where that is 0."""
    page_size = draw(st.sampled_from([one for one in PAGE_SIZES if one % dcp == 0] or [dcp]))
    drafts = draw(st.sampled_from([0, 0, 1, 2]))
    if not held[0][0]:
        index = sorted(draw(st.sets(st.integers(0, num_layers - 1), max_size=min(num_layers, 12))))
        parts = [latent(page_size, range(num_layers), bytes_per_token=draw(st.sampled_from([3, 16])))]
        if index:
            own_group = page_size % (2 * dcp) == 0 and draw(st.booleans())
            keys = index_k(page_size // 2 if own_group else page_size, index, key_bytes=4, scale_bytes=2)
            parts.append(replace(keys, page_group="index") if own_group else keys)
        if drafts:
            draft = latent(page_size, range(drafts), bytes_per_token=5)
            parts.append(replace(draft, name=DRAFT_PREFIX + "latent"))
        sides = [[CacheLayout(num_layers, tuple(parts), drafts)] * len(side) for side in held]
    else:
        fields = draw(st.sampled_from(["one", "two"]))
        odd = st.tuples(st.booleans(), st.sampled_from([0, 0, 3]))
        shapes = [(fields, *draw(odd)) for _ in range(2)]
        if draw(st.booleans()):
            shapes[1] = shapes[0]
        some = sorted(draw(st.sets(st.integers(0, num_layers - 1), min_size=1, max_size=4)))
        sides = [[], []]
        for number, side in enumerate(held):
            for count in side:
                sides[number].append(_of_heads(num_layers, page_size, some, count, shapes[number], drafts))
    if drafts:
        lacking = draw(st.sampled_from([(), (), (0,), (1,)]))
        for side in lacking:
            sides[side] = [
                CacheLayout(num_layers, tuple(one for one in layout.components if not one.is_draft))
                for layout in sides[side]
            ]
    return sides


def _of_heads(
    num_layers: int, page_size: int, some: Sequence[int], num_heads: int, shape: Shape, drafts: int
) -> CacheLayout:
    made = [
        by_heads("k", page_size, range(num_layers), num_heads, shape),
        by_heads("v", page_size, some, num_heads, shape),
    ]
    if drafts:
        made.append(by_heads(DRAFT_PREFIX + "k", page_size, range(drafts), num_heads, shape))
    return CacheLayout(num_layers, tuple(made), drafts)


@st.composite
def starts(draw: st.DrawFn, num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Stage boundaries, even or anywhere; a stage may be empty."""
    cuts = draw(st.lists(st.integers(0, num_layers), min_size=num_stages - 1, max_size=num_stages - 1))
    return (0, *sorted(cuts))


@st.composite
def plans(draw: st.DrawFn, layout: CacheLayout, sizes: ParallelSizes) -> LayerPlan:
    """A whole plan: balanced, or with boundaries anywhere; components each with a kind and a cut of their own."""
    stages = draw(st.one_of(st.none(), starts(layout.num_layers, sizes.pp)))
    kind = draw(st.sampled_from([PlanKind.SPLIT, PlanKind.SPLIT, PlanKind.REPLICATED]))
    plan = LayerPlan.balanced(layout, sizes, kind, stages)
    if draw(st.booleans()):
        return plan
    kinds = dict(plan.kinds)
    owned: dict[RankCoordinates, dict[str, tuple[int, ...]]] = {one: dict(had) for one, had in plan.owned.items()}
    whole = LayerPlan.balanced(layout, replace(sizes, cp=1), PlanKind.SPLIT, stages).owned
    for name in (one.name for one in layout.components):
        kinds[name] = draw(st.sampled_from(PlanKind))
        for pp in range(sizes.pp):
            layers = whole[RankCoordinates(pp=pp)].get(name, ())
            bounds = sorted(draw(st.lists(st.integers(0, len(layers)), min_size=sizes.cp - 1, max_size=sizes.cp - 1)))
            pieces = [layers[a:b] for a, b in itertools.pairwise((0, *bounds, len(layers)))]
            for rank in owned:
                if rank.pp == pp:
                    owned[rank][name] = pieces[rank.cp] if kinds[name] is PlanKind.SPLIT else layers
    return LayerPlan(sizes, kinds, owned)


@st.composite
def topologies(draw: st.DrawFn, most_ranks: int = MOST_RANKS) -> Topology:
    ranks = st.sampled_from([one for one in RANKS if one <= most_ranks])
    is_mla = draw(st.booleans())
    tp, readers_tp = draw(ranks), draw(ranks)
    readers_pp = draw(
        st.sampled_from([one for one in (1, 1, 2, 3, 4) if one * readers_tp <= max(most_ranks // 2, readers_tp)])
    )
    held, replicas = [(0,) * tp, (0,) * readers_tp], readers_tp
    if not is_mla:
        even = [draw(st.sampled_from([one for one in (1, 2, 3, 4, 8) if n % one == 0])) for n in (tp, readers_tp)]
        held = [(HEADS // one,) * n for one, n in zip(even, (tp, readers_tp), strict=True)]
        replicas = readers_tp // even[1]
        if readers_tp > 1 and draw(st.integers(0, 3)) == 0:  # heads that do not come out even
            readers_tp, replicas = 5, 1
            held[1] = tuple(len(one) for one in balanced_ranges(HEADS, readers_tp))
        if tp > 1 and draw(st.integers(0, 3)) == 0:
            tp = 5
            held[0] = tuple(len(one) for one in balanced_ranges(HEADS, tp))
    cp = draw(st.sampled_from([one for one in (1, 2, 3, 4, 8) if one * tp <= max(most_ranks, tp)]))
    pp = draw(st.sampled_from([one for one in (1, 2, 3, 4) if one * cp * tp <= max(most_ranks, tp)]))
    dp = draw(st.sampled_from([one for one in (1, 1, 1, 2) if one * pp * cp * tp <= max(most_ranks, tp)]))
    dcp = draw(st.sampled_from([one for one in (1, 1, 2, 4, 8) if replicas % one == 0]))
    sizes = ParallelSizes(dp, pp, cp, tp)
    taken_sizes = DecodeSizes(draw(st.sampled_from([1, 1, 2])), readers_pp, readers_tp, dcp)
    counted = dp * cp * tp + taken_sizes.dp * readers_tp
    num_layers = draw(st.sampled_from([one for one in LAYERS if one * counted <= MOST_LAYERS]))
    prefill, decode = draw(layouts((held[0], held[1]), dcp, num_layers))
    plan = draw(plans(prefill[0], sizes))
    stages = draw(st.one_of(st.none(), starts(decode[0].num_layers, readers_pp)))
    taken = DecodePlan.balanced(decode[0], taken_sizes, stages)
    return Topology(tuple(prefill), plan, tuple(decode), taken, draw(st.sampled_from([0, 5])))


@st.composite
def cases(
    draw: st.DrawFn, ways: Sequence[str] = ("direct",), most_ranks: int = MOST_RANKS, *, digested: bool = False
) -> Case:
    """`digested`: pages always have digests, otherwise sometimes."""
    topology = draw(topologies(most_ranks))
    size = max(group.page_size for group in topology.decode.page_groups) * topology.taken.sizes.dcp
    asks = []
    for _ in range(topology.taken.sizes.dp):
        pages = draw(st.integers(1, 4))
        tokens = max(1, pages * size + draw(st.sampled_from([0, 1, -1, -(size // 2)])))
        prefix = draw(st.sampled_from([0, 0, 0, 1, size - 1, size, size + 1, tokens - 1, tokens]))
        group = draw(st.integers(0, topology.plan.sizes.dp - 1))
        asks.append(Ask(tokens, min(tokens, max(0, prefix)), group, draw(st.integers(0, 1 << 30))))
    kind = draw(st.sampled_from([*DigestKind] if digested else ["", "", *DigestKind]))
    return Case(topology, tuple(asks), draw(st.sampled_from(list(ways))), kind)
