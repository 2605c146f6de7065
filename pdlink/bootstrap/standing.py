"""Owns how a rank's registration stands at an address: the states, what the log says of them, and the sentence for
health. It registers nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from enum import StrEnum

from pdlink.address import Address
from pdlink.sparse_log import SparseLog

log = logging.getLogger("pdlink.bootstrap")
QUIET_TRIES = 2
"""How often in a row a service may not answer before that is worth a warning: one that restarts is back by then."""
GRACE_S = 5.0
"""How long a rank may be registered nowhere before its process is not well: bootstraps start and restart."""


class KeeperState(StrEnum):
    STARTING = "starting"
    REGISTERED = "registered"
    UNREACHABLE = "unreachable"
    """The service does not answer; tried again until it does."""
    REFUSED = "refused"
    """The service refuses the registration; tried again, since the worker in the way may leave."""
    OUTRANKED = "outranked"
    """This process has just started, and an older one of its name has the greater incarnation: a clock went back. Tried
    again until the other's lease has run out."""
    REPLACED = "replaced"
    """A newer process has this worker's name: over for good."""
    DEAD = "dead"
    """The thread ended by a defect."""
    CLOSED = "closed"


WAITING = (KeeperState.STARTING, KeeperState.UNREACHABLE)
"""What a bootstrap that is about to come explains."""


class Teller:
    """Tells the log how one address stands: trouble as warnings, each reason once in a while. One thread."""

    def __init__(self, worker_id: str, address: Address, clock: Callable[[], float] = time.monotonic) -> None:
        self._worker_id = worker_id
        self._address = address
        self._log = SparseLog(log, clock)
        self._num_unanswered = 0
        self._is_worried = False

    def tell(self, state: KeeperState, error: Exception | None, *, moved: bool) -> None:
        """A step ended in `state`; `moved` where the one before did not."""
        self._num_unanswered = self._num_unanswered + 1 if state is KeeperState.UNREACHABLE else 0
        if state in (KeeperState.REFUSED, KeeperState.OUTRANKED):
            self._warn(state, error, "tried again until it is accepted")
        elif self._num_unanswered > QUIET_TRIES:
            self._warn(state, error, "tried again until it answers")
        elif state is KeeperState.REPLACED:
            fix = "this process is not registered any more and takes no new requests there; end it, or give it a name"
            self._warn(state, error, f"{fix} of its own")
        elif moved:
            level = logging.WARNING if self._is_worried and state is KeeperState.REGISTERED else logging.INFO
            why = f" ({error})" if error else ""
            log.log(level, "worker %s at bootstrap %s: %s%s", self._worker_id, self._address, state, why)
            self._is_worried = self._is_worried and state is not KeeperState.REGISTERED

    def _warn(self, state: KeeperState, error: Exception | None, what_now: str) -> None:
        self._is_worried = True
        kind = (state, str(error) if state is KeeperState.REFUSED else "")
        text = "worker %s is not registered at bootstrap %s: %s (%s); %s"
        self._log.warn(kind, text, self._worker_id, self._address, state, error, what_now)


def describe(
    states: Mapping[Address, KeeperState], errors: Mapping[Address, Exception], nowhere_s: float
) -> tuple[str, bool]:
    """What health says of a registration, and whether it makes the process unwell.

    `nowhere_s` is how long it has been registered nowhere. A dead thread tells of itself, and one that was closed has
    nothing to tell.
    """
    lacking = {
        address: state
        for address, state in states.items()
        if state not in (KeeperState.REGISTERED, KeeperState.DEAD, KeeperState.CLOSED)
    }
    said = "; ".join(f"bootstrap {one} {state}: {errors.get(one, 'no answer yet')}" for one, state in lacking.items())
    if not lacking:
        return "", False
    if KeeperState.REPLACED in lacking.values():
        return f"replaced by a newer process that registered under its name: {said}", True
    if KeeperState.REGISTERED in states.values():
        return f"not registered everywhere: {said}", False
    is_waiting = all(state in WAITING for state in lacking.values()) and nowhere_s < GRACE_S
    return f"registered nowhere: {said}", not is_waiting
