"""Owns whom a prefill rank lets subscribe, and what it answers to a release of an unknown request. Pure."""

from __future__ import annotations

from pdlink.bootstrap import compat
from pdlink.bootstrap.messages import Side
from pdlink.control.frames import Release, Subscribe, Verdict
from pdlink.layout.fingerprint import Fingerprint
from pdlink.transfer.failure import Failure, FailureReason


def refusal(side: Side, worker_id: str, incarnation: int, body: Subscribe) -> Failure | None:
    """Protocol, then fingerprint, then who is meant: the order in which both sides check."""
    theirs = body.fingerprint
    if theirs is None and body.fingerprint_digest == side.fingerprint.digest:
        theirs = side.fingerprint
    if theirs is None:
        theirs = Fingerprint((("fingerprint", body.fingerprint_digest.hex()),))
    mismatches = compat.check(side, Side(body.protocol, theirs))
    if mismatches:
        return Failure.incompatible(mismatches, body.readers.decode_instance, "subscribe")
    if body.incarnation != incarnation:
        text = (
            f"{worker_id} has incarnation {incarnation}, the subscribe means {body.incarnation}: the process was "
            "replaced"
        )
        return Failure(FailureReason.STALE, text, worker_id, "subscribe", "resolve again")
    return None


def verdict_without_request(worker_id: str, body: Release) -> Verdict:
    if not body.pulled:
        return Verdict(True)
    text = f"{worker_id} does not know this request (any more), so it cannot vouch for its pages"
    return Verdict(False, Failure(FailureReason.STALE, text, worker_id, "confirming"))
