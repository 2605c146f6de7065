"""Owns the wording of the failures that a prefill rank finds itself: what is wrong, on whom, and what to change.

Pure. When a request fails is decided in `sender`; who may subscribe at all, in `admission`.
"""

from __future__ import annotations

from pdlink.layout.readers import ReaderSet
from pdlink.transfer.failure import Failure, FailureReason

LEASE = "PDLINK_PUBLICATION_LEASE_S"
LIVENESS = "PDLINK_LIVENESS_TIMEOUT_S"


def unread(has_readers: bool, silent_s: float) -> Failure:
    """The lease of published pages is over, and nobody has touched them."""
    who = "no reader was heard" if has_readers else "nobody has asked for the published pages"
    fix = f"see whether decode is alive and was sent this request, or raise {LEASE} on prefill"
    return Failure(FailureReason.EXPIRED, f"{who} for {silent_s:.1f} s ({LEASE})", fix=fix)


def unwritten(waited_s: float) -> Failure:
    """The lease of pages is over that a device has not computed."""
    text = f"the device has not written published pages for {waited_s:.1f} s"
    return Failure(FailureReason.EXPIRED, text, fix=f"look for work on the engine's stream that does not end ({LEASE})")


def silent_reader(index: int, decode_instance: str, silent_s: float, *, is_lease: bool) -> Failure:
    """A reader must be dead. `is_lease`: the lease is shorter than liveness, and so is what ended the request."""
    text = f"reader {index} of {decode_instance!r} has not been heard for {silent_s:.1f} s"
    fix = f"see whether that decode rank is alive, or raise {LEASE if is_lease else LIVENESS} on prefill"
    return Failure(FailureReason.PEER_GONE, text, fix=fix)


def withdrawn(num_pages: int) -> Failure:
    return Failure(FailureReason.GENERATION, f"{num_pages} published pages were withdrawn by the prefill engine")


def taken_back(sequence: int, generation: int, current: int | None, why: Failure | None, worker_id: str) -> Failure:
    """A reader has pulled what was not published any more. `why` the request had ended, where it had."""
    text = f"pages of publication {sequence} were taken back while they were read (generation {generation}"
    cause = f": {why.text}" if why else ""
    return Failure(FailureReason.GENERATION, f"{text}, now {current}){cause}", worker_id)


def other_readers(transfer_id: str, first: ReaderSet, second: ReaderSet) -> Failure:
    """Two decode instances, or two ideas of one, ask for a request."""
    return Failure(
        FailureReason.DUPLICATE,
        f"transfer {transfer_id!r} is read by {first.decode_instance!r} with {first.num_readers} readers; "
        f"{second.decode_instance!r} with {second.num_readers} readers asks for it too",
        fix="give every live request a transfer id of its own",
    )


def replaced(transfer_id: str, worker_id: str) -> Failure:
    text = f"this attempt does not read transfer {transfer_id!r} (any more): a newer one took its place"
    return Failure(FailureReason.STALE, text, worker_id)


def event_lost(error: Exception, worker_id: str) -> Failure:
    """The engine's device event raised what it should not."""
    text = f"the device event of a publication could not be asked: {type(error).__name__}: {error}"
    return Failure(FailureReason.BACKEND, text, worker_id, fix="look for a device error in the engine's log")


def undigested(error: Exception, worker_id: str) -> Failure:
    return Failure(FailureReason.BACKEND, f"published pages could not be digested: {error}", worker_id)
