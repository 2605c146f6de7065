"""Owns the question whether two sides fit: protocol, then fingerprint, then body. Pure; refusing is up to callers.

Both ends ask it with the same two `Side` values, so both come to the same mismatches in the same words.
"""

from __future__ import annotations

from dataclasses import replace

from pdlink.bootstrap.messages import PrefillServerInfo, ProtocolRange, Registration, Side
from pdlink.errors import Mismatch
from pdlink.layout import CacheLayout, LayerPlan, compare, find_faults, fingerprint
from pdlink.layout.components import DRAFT_PREFIX


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


def _draft_layout(layout: CacheLayout) -> CacheLayout | None:
    """The draft components of `layout` as a layout of their own, without the prefix."""
    drafts = tuple(replace(one, name=one.name.removeprefix(DRAFT_PREFIX)) for one in layout.components if one.is_draft)
    return CacheLayout(layout.num_draft_layers, drafts) if drafts else None


def _draft_names(layout: CacheLayout) -> str:
    return ", ".join(sorted(one.name for one in layout.components if one.is_draft)) or "absent"


def _check_equal(field: str, held: str, new: str) -> tuple[Mismatch, ...]:
    return () if held == new else (Mismatch(field, held, new, "start every rank with the same settings"),)
