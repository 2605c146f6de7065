"""Owns the wording of the receiver's own failures: which wait ran out, on whom, and what to change. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pdlink.transfer.failure import Failure, FailureReason


def timed_out(what: str, waited_s: float, setting: str, worker_id: str = "", detail: str = "") -> Failure:
    """A named wait that took longer than its setting."""
    more = f": {detail}" if detail else ""
    text = f"{what} took longer than {waited_s:g} s{more}"
    return Failure(FailureReason.TIMEOUT, text, worker_id, fix=f"see that rank's log, or raise {setting}")


def silent(worker_id: str, waited_s: float) -> Failure:
    text = f"{worker_id} has not been heard for {waited_s:g} s"
    return Failure(FailureReason.PEER_GONE, text, worker_id, fix="see whether that prefill rank is alive")


def not_published(worker_id: str, component: str, layer: int, page: int) -> Failure:
    text = f"{worker_id} published its last page, but never page {page} of {component!r} layer {layer}"
    fix = "check that both engines agree on the length of the prompt"
    return Failure(FailureReason.PLAN, text, worker_id, fix=fix)


def no_aux(worker_id: str) -> Failure:
    text = f"{worker_id} is elected to send the aux of the request and sent none"
    return Failure(FailureReason.PROTOCOL, text, worker_id, fix="pass aux to the last publish on every prefill rank")


def replaced(worker_id: str, expected: int, found: int) -> Failure:
    text = f"{worker_id} answered as incarnation {found}, the request was planned for {expected}"
    return Failure(FailureReason.STALE, text, worker_id, fix="retry the request")


def waiting_for(worker_ids: Sequence[str]) -> str:
    return f"still waiting for {', '.join(worker_ids)}" if worker_ids else "no owner is outstanding"
