"""Owns when the front tries a request again, as a pure decision, and what a failed try is called."""

from __future__ import annotations

from dataclasses import dataclass

from pdlink.errors import PdlinkError

LEAST_PAUSE_S, MOST_PAUSE_S = 0.1, 1.0


class TryFailed(PdlinkError):
    """One try of a request came to nothing. `may_retry`: the same request may do elsewhere, or later."""

    def __init__(self, text: str, *, may_retry: bool) -> None:
        super().__init__(text)
        self.may_retry = may_retry


@dataclass(slots=True)
class Attempts:
    """The tries of one request until `give_up_at`, a time of the caller's clock in seconds."""

    give_up_at: float
    count: int = 0
    has_shown: bool = False
    """Whether the caller has seen a token: another try could show it something else."""

    def pause_s(self, failed: TryFailed, now: float) -> float | None:
        """How long to wait before the next try; None when there is none."""
        if self.has_shown or not failed.may_retry:
            return None
        pause = min(MOST_PAUSE_S, LEAST_PAUSE_S * 2 ** min(self.count, 10))
        return pause if now + pause < self.give_up_at else None
