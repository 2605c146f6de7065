"""Owns the sentences of `pdlink plan` that say why shares are uneven and bytes are pulled more than once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdlink.layout.components import CacheLayout
    from pdlink.layout.decode_plan import DecodeSizes


def uneven_layers(layout: CacheLayout, pp: int, cp: int) -> list[str]:
    """Why ranks own different numbers of layers, where `pp` stages are each split over `cp` ranks (1: not split)."""
    notes = []
    count, base, extra = layout.num_layers, *divmod(layout.num_layers, pp)
    if extra:
        notes.append(f"{count} layers do not divide by pp {pp}: {_shares(base, extra, pp, 'stage', 'has', 'have')}")
    for stage in [base + 1, base] if extra else [base]:
        each, more = divmod(stage, cp)
        if more and each:
            of_what = f"{stage} layers of a stage" if pp > 1 else f"{stage} layers"
            notes.append(f"{of_what} do not divide by cp {cp}: {_shares(each, more, cp, 'rank', 'owns', 'own')}")
    return notes


def partial_components(layout: CacheLayout) -> list[str]:
    """Why ranks with as many layers have different numbers of some component."""
    count = layout.num_layers
    return [
        f"{one.name} is on {len(one.layers)} of {count} layers and goes with them: more of these layers, more of it"
        for one in layout.components
        if not one.is_draft and len(one.layers) < count
    ]


def uneven_heads(layout: CacheLayout, tp: int) -> list[str]:
    """Why tensor-parallel ranks hold different numbers of heads."""
    heads = _num_heads(layout)
    base, extra = divmod(heads, tp)
    if not base or not extra:
        return []
    return [f"{heads} KV heads do not divide by tp {tp}: {_shares(base, extra, tp, 'tp rank', 'holds', 'hold')}"]


def _shares(base: int, extra: int, num_parts: int, part: str, has: str, have: str) -> str:
    rest = num_parts - extra
    first = f"the first {part} {has}" if extra == 1 else f"the first {extra} {part}s {have}"
    return f"{first} {base + 1}, the other{f' {rest} {have}' if rest > 1 else f' {has}'} {base or 'none'}"


def num_copies(layout: CacheLayout, sizes: DecodeSizes) -> int:
    """How many decode ranks pull each byte of a request."""
    return max(1, _num_alike(layout, sizes) // sizes.dcp)


def copies(layout: CacheLayout, sizes: DecodeSizes, nbytes: str) -> str:
    """How often each byte of a request's cache, `nbytes` as text, is pulled, and why."""
    count, alike = num_copies(layout, sizes), _num_alike(layout, sizes)
    if count == 1:
        return f"the request's cache is {nbytes}, and each byte of it is pulled once"
    if sizes.dcp > 1:
        why = f"{alike} decode tp ranks hold the same, and dcp {sizes.dcp} of them share a copy"
    elif _num_heads(layout):
        why = f"tp {sizes.tp} is more than the {_num_heads(layout)} heads, so {alike} decode tp ranks hold the same one"
    else:
        why = f"it has no heads to split, so each of {alike} decode tp ranks keeps all of it"
    return f"the request's cache is {nbytes}, and each byte of it is pulled {count} times: {why}"


def _num_alike(layout: CacheLayout, sizes: DecodeSizes) -> int:
    """Decode tp ranks of a stage that hold the same heads, or the same rows where there are none."""
    heads = _num_heads(layout)
    return max(1, sizes.tp // heads) if heads else sizes.tp


def _num_heads(layout: CacheLayout) -> int:
    """KV heads of the model; 0 where nothing is split by heads."""
    return max(one.total_heads for one in layout.components)
