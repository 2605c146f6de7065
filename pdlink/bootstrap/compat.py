"""Owns the question whether two sides fit: protocol, then fingerprint, then body. Pure; refusing is up to callers.

Both ends ask it with the same two `Side` values, so both come to the same mismatches in the same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pdlink.bootstrap.messages import PrefillServerInfo, ProtocolRange, Registration, Side
from pdlink.config import PREFIX, Settings
from pdlink.errors import Mismatch
from pdlink.layout import CacheLayout, LayerPlan, compare, find_faults, fingerprint
from pdlink.layout.components import DRAFT_PREFIX, Component
from pdlink.layout.page_slices import obstacle
from pdlink.layout.parts import Part, part_of

KEYS_NOT_TAKEN = Mismatch(
    "control_curve",
    "on",
    "off",
    f"so that decode may take the keys, give it TLS to the bootstrap ({PREFIX}TLS_CA) or set "
    f"{PREFIX}ALLOW_PLAINTEXT_SECRETS=1 there, and upgrade it where it knows neither; or set {PREFIX}CONTROL_CURVE=off "
    "on prefill",
)
"""Why a side that takes no control keys cannot talk to ranks that have them."""


def check(prefill: Side, decode: Side) -> tuple[Mismatch, ...]:
    """Why the sides do not fit; empty when they do.

    Without a common protocol version that is the only mismatch: what the rest means is then unknown. Otherwise every
    differing field of the fingerprint is listed.
    """
    return _check_protocol(prefill.protocol, decode.protocol) or compare(prefill.fingerprint, decode.fingerprint)


def check_body(prefill: PrefillServerInfo, decode: CacheLayout | None = None) -> tuple[Mismatch, ...]:
    """Why an instance whose side fits cannot be pulled from; empty when it can.

    The plan must be whole, and where `decode` is given and both sides cache a draft model, the drafts must agree.
    """
    plan = tuple(
        Mismatch("layer plan", text, "every layer from one owner", "restart the prefill ranks with one plan")
        for text in plan_faults(prefill.layout, prefill.layer_plan())
    )
    return plan if plan or decode is None else _compare_drafts(prefill.layout, decode)


def check_parts(
    prefill: PrefillServerInfo, decode: CacheLayout, parts: Mapping[str, Part], settings: Settings
) -> tuple[Mismatch, ...]:
    """Why pages of an instance, whose side and body fit, cannot become pages of a decode rank that holds `parts` of
    them; empty when they can. That prefill lacks a draft which decode has is a reason where the settings demand it."""
    found = []
    by_tp = [prefill.layout_of(tp) for tp in range(prefill.sizes.tp)]
    theirs = {one.name: one for one in prefill.layout.components}
    offered = {region.component for rank in prefill.ranks for region in rank.regions}
    for here in decode.components:
        there, wanted = theirs.get(here.name), parts[here.name]
        if settings.require_draft and here.is_draft and here.name not in offered:
            fix = f"start prefill with the draft model too, or set {PREFIX}REQUIRE_DRAFT=0 on decode"
            found.append(Mismatch(here.name, "not offered" if there else "absent", "required", fix))
        if there is None:
            continue
        sides = [layout.component(here.name) for layout in by_tp]
        held = [part_of(one, tp, prefill.sizes.tp) for tp, one in enumerate(sides)]
        obstacles = (obstacle(one, part, here, wanted) for one, part in zip(sides, held, strict=True))
        if text := next(filter(None, obstacles), ""):
            found.append(Mismatch(f"{here.name}.part", str(held[0]), str(wanted), text))
    return tuple(found)


def check_control_keys(prefill: PrefillServerInfo, settings: Settings) -> tuple[Mismatch, ...]:
    """Why decode with `settings` must not talk to the control sockets of `prefill`; empty when it may.

    It refuses plain ones where it demands CURVE, and CURVE where that is off. Otherwise it takes what each rank has.
    """
    fix = f"set {PREFIX}CONTROL_CURVE, and the token or TLS that it follows, alike on both sides"
    for rank in prefill.ranks:
        if rank.control_keys is None and settings.uses_curve:
            return (Mismatch("control_curve", f"off ({rank.worker_id})", "on", fix),)
        if rank.control_keys is not None and settings.control_curve == "off":
            return (Mismatch("control_curve", f"on ({rank.worker_id})", "off", fix),)
    return ()


def plan_faults(layout: CacheLayout, plan: LayerPlan) -> tuple[str, ...]:
    """Why the plan is not whole: the missing ranks alone where there are any, since they explain the gaps."""
    if len(plan.owned) < plan.sizes.num_ranks:
        return tuple(f"rank {rank} has not registered" for rank in plan.sizes.ranks() if rank not in plan.owned)
    return tuple(one.text for one in find_faults(layout, plan))


def differences(held: Registration, new: Registration) -> tuple[Mismatch, ...]:
    """What `new` says otherwise than `held`, of all that the ranks of one instance must say alike."""
    found = list(_check_equal("protocol", str(held.protocol), str(new.protocol)))
    if held.layout != new.layout:
        found += compare(fingerprint(held.layout), fingerprint(new.layout))
        found += _check_equal("draft components", _draft_names(held.layout), _draft_names(new.layout))
        found += _compare_drafts(held.layout, new.layout)
    found += _check_equal("parallel sizes", str(held.sizes), str(new.sizes))
    if not found and held.rank.coordinates.tp == new.rank.coordinates.tp:
        found += _compare_pages(held.layout, new.layout, held.rank.coordinates.tp)
    if not found:
        for name, kind in held.kinds.items():
            found += _check_equal(f"{name}.plan", str(kind), str(new.kinds[name]))
    return tuple(found)


def _check_protocol(prefill: ProtocolRange, decode: ProtocolRange) -> tuple[Mismatch, ...]:
    if prefill.agree(decode) is not None:
        return ()
    older = "prefill" if prefill.greatest < decode.least else "decode"
    return (Mismatch("protocol", str(prefill), str(decode), f"upgrade pdlink on {older}"),)


def _compare_drafts(prefill: CacheLayout, decode: CacheLayout) -> tuple[Mismatch, ...]:
    """Differences of the draft models; none where a side has no draft, because it then takes no part in the move."""
    ours, theirs = _draft_layout(prefill), _draft_layout(decode)
    if ours is None or theirs is None:
        return ()
    found = compare(fingerprint(ours), fingerprint(theirs))
    return tuple(replace(one, field=DRAFT_PREFIX + one.field) for one in found)


def _compare_pages(held: CacheLayout, new: CacheLayout, tp: int) -> tuple[Mismatch, ...]:
    """Differences in what pages look like that ranks of different heads may have, and others may not."""
    fix = f"start every rank of tp {tp} with the same heads and storage format"
    return tuple(
        Mismatch(f"{one.name}.pages", _pages_text(one), _pages_text(other), fix)
        for one, other in zip(held.components, new.components, strict=True)
        if one != other
    )


def _pages_text(component: Component) -> str:
    fields = ", ".join(f"{one.name}@{one.offset}/{one.token_stride}/{one.head_stride}" for one in component.fields)
    return f"{component.num_heads} heads in {component.page_bytes} B ({fields})"


def _draft_layout(layout: CacheLayout) -> CacheLayout | None:
    """The draft components of `layout` as a layout of their own, without the prefix."""
    drafts = tuple(replace(one, name=one.name.removeprefix(DRAFT_PREFIX)) for one in layout.components if one.is_draft)
    return CacheLayout(layout.num_draft_layers, drafts) if drafts else None


def _draft_names(layout: CacheLayout) -> str:
    return ", ".join(sorted(one.name for one in layout.components if one.is_draft)) or "absent"


def _check_equal(field: str, held: str, new: str) -> tuple[Mismatch, ...]:
    return () if held == new else (Mismatch(field, held, new, "start every rank with the same settings"),)
