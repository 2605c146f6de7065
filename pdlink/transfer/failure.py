"""Owns the description of why a transfer ended badly. It is a value: latching the first one is the receiver's job."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from pdlink.errors import IncompatibleError, Mismatch


class FailureReason(StrEnum):
    INCOMPATIBLE = "incompatible"
    DUPLICATE = "duplicate"
    NOT_READY = "not_ready"
    STALE = "stale"
    PEER_GONE = "peer_gone"
    TIMEOUT = "timeout"
    ABORTED = "aborted"
    EXPIRED = "expired"
    GENERATION = "generation"
    DIGEST = "digest"
    PLAN = "plan"
    BACKEND = "backend"
    PROTOCOL = "protocol"
    LIMIT = "limit"
    INTERNAL = "internal"
    DENIED = "denied"
    """Credentials that are refused or may not be sent: the same request never succeeds as things are set."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One cause: a reason to count by, a sentence, the rank it concerns, the stage, and what to do.

    `worker_id` is the prefill rank, or on prefill the decode instance that ended it; `stage` the state in which it
    happened. `mismatches` carries both values of every field of an incompatible pair.
    """

    reason: FailureReason
    text: str
    worker_id: str = ""
    stage: str = ""
    fix: str = ""
    mismatches: tuple[Mismatch, ...] = ()

    @classmethod
    def incompatible(cls, mismatches: tuple[Mismatch, ...], peer: str = "", stage: str = "") -> Failure:
        text = str(IncompatibleError(mismatches, peer))
        return cls(FailureReason.INCOMPATIBLE, text, peer, stage, mismatches[0].fix, mismatches)

    def at(self, stage: str, worker_id: str = "") -> Failure:
        """The same cause with the stage and the rank filled in where they are missing."""
        return replace(self, stage=self.stage or stage, worker_id=self.worker_id or worker_id)

    def __str__(self) -> str:
        places = [one for one in (self.stage, self.worker_id) if one]
        where = f" [{', '.join(places)}]" if places else ""
        advice = f"; {self.fix}" if self.fix and self.fix not in self.text else ""
        return f"{self.reason}: {self.text}{advice}{where}"
