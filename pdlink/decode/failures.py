"""Owns the wording of the receiver's own failures: which wait ran out, on whom, and what to change. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdlink.control.frames import Staged
from pdlink.errors import Mismatch
from pdlink.layout.regions import Region
from pdlink.layout.staging import StagingArea
from pdlink.transfer.digests import DigestKind
from pdlink.transfer.failure import Failure, FailureReason

RESTART = "look into this process's log, which has the traceback, and restart it"


def timed_out(what: str, waited_s: float, setting: str, worker_id: str = "", detail: str = "") -> Failure:
    """A named wait that took longer than its setting."""
    more = f": {detail}" if detail else ""
    text = f"{what} took longer than {waited_s:g} s{more}"
    return Failure(FailureReason.TIMEOUT, text, worker_id, fix=f"see that rank's log, or raise {setting}")


def nothing_published(owners: Mapping[str, bool], waited_s: float) -> Failure:
    """No owner has published a page; `owners` says of each whether its engine has begun with the request."""
    told = [f"{name} ({'begun' if begun else 'its engine has not begun'})" for name, begun in owners.items()]
    text = f"no page was published for {waited_s:g} s by {', '.join(told)}"
    first = next((name for name, begun in owners.items() if not begun), next(iter(owners)))
    fix = "see the queue of that prefill engine, or raise PDLINK_FIRST_PAGE_TIMEOUT_S"
    return Failure(FailureReason.TIMEOUT, text, first, fix=fix)


def silent(worker_id: str, waited_s: float, place: str = "") -> Failure:
    text = f"{worker_id} has not been heard for {waited_s:g} s{f': it {place}' if place else ''}"
    return Failure(FailureReason.PEER_GONE, text, worker_id, fix="see whether that prefill rank is alive")


def not_published(worker_id: str, component: str, layer: int, page: int) -> Failure:
    text = f"{worker_id} published its last page, but never page {page} of {component!r} layer {layer}"
    fix = "check that both engines agree on the length of the prompt"
    return Failure(FailureReason.PLAN, text, worker_id, fix=fix)


def unknown_digests(kind: str) -> Mismatch:
    known = [one.value for one in DigestKind]
    fix = f"upgrade pdlink on decode, or set PDLINK_DIGEST_KIND={known[0]} on prefill"
    return Mismatch("the kind of page digests", repr(kind), f"none but {' and '.join(known)}", fix)


def wrong_page(worker_id: str, region: Region, page: int, kind: str, ours: int, theirs: int) -> Failure:
    text = (
        f"digest of {region.component!r} layer {region.layer}, page {page} differs from what {worker_id} published: "
        f"{kind} {ours:016x} here, {theirs:016x} there"
    )
    fix = "look for an engine that writes published pages, or for a faulty link"
    return Failure(FailureReason.DIGEST, text, worker_id, fix=fix)


def no_aux(worker_id: str) -> Failure:
    text = f"{worker_id} is elected to send the aux of the request and sent none"
    return Failure(FailureReason.PROTOCOL, text, worker_id, fix="pass aux to the last publish on every prefill rank")


def replaced(worker_id: str, expected: int, found: int) -> Failure:
    text = f"{worker_id} answered as incarnation {found}, the request was planned for {expected}"
    return Failure(FailureReason.STALE, text, worker_id, fix="retry the request")


def no_own_slot(worker_id: str, num_slots: int, waited_s: float) -> Failure:
    text = f"none of the {num_slots} own staging slots came free within {waited_s:g} s"
    fix = "raise PDLINK_STAGING_SLOTS or PDLINK_STAGING_TIMEOUT_S on decode"
    return Failure(FailureReason.TIMEOUT, text, worker_id, "staging", fix)


def nothing_staged(worker_id: str, waited_s: float) -> Failure:
    text = f"{worker_id} has staged nothing for {waited_s:.1f} s"
    fix = "see that rank's log, or raise PDLINK_STAGING_TIMEOUT_S"
    return Failure(FailureReason.TIMEOUT, text, worker_id, "staging", fix)


def unusable(
    worker_id: str, answer: Staged, nbytes: int, area: StagingArea, sequence: int, generation: int
) -> Failure | None:
    """Why an owner's answer cannot be what was asked for: `nbytes` of a publication in this generation."""
    if answer.slot >= area.num_slots or answer.offset != answer.slot * area.slot_bytes or answer.nbytes != nbytes:
        text = (
            f"staged {answer.nbytes} bytes in slot {answer.slot} at {answer.offset}; asked were {nbytes} bytes in one "
            f"of {area.num_slots} slots of {area.slot_bytes}"
        )
        return Failure(FailureReason.PROTOCOL, text, worker_id, "staging")
    if answer.generation != generation:
        text = f"publication {sequence} was taken back before its pages were packed"
        return Failure(FailureReason.GENERATION, text, worker_id, "staging")
    return None


def waiting_for(worker_ids: Sequence[str]) -> str:
    return f"still waiting for {', '.join(worker_ids)}" if worker_ids else "no owner is outstanding"
