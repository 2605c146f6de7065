"""Owns the exception tree of pdlink and how a refusal reads. It decides nothing and holds no state.

Every error that a caller may see derives from `PdlinkError`. A refusal names the field, both values, the peer
and what to change; `Mismatch` is that sentence as a value, so that both ends of a link print the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class PdlinkError(Exception):
    """Anything that pdlink refuses or fails at. `str(error)` is one line fit for an operator."""


class InvalidInput(PdlinkError, ValueError):
    """A value from outside (flag, file, environment, frame, engine call) that cannot be used; or several of them,
    each told in `problems`, and all of them in `str`."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        told = "; ".join(f"({number}) {one}" for number, one in enumerate(problems, 1))
        super().__init__(f"{len(problems)} values cannot be used: {told}" if len(problems) > 1 else "".join(problems))


class ConfigError(InvalidInput):
    """A setting that is unknown or out of range."""


class AddressError(InvalidInput):
    """Text that is not a usable host and port."""


class FrameError(InvalidInput):
    """A wire message that is malformed, too large, or of an unknown kind."""


class LayoutError(InvalidInput):
    """A component, field, region or layer plan that contradicts itself."""


class PlanError(PdlinkError):
    """A transfer plan that would leave a byte without a source, give it two, or read what a rank does not own."""


class IncompatibleError(PdlinkError):
    """Two sides whose protocol or cache layout differ. `mismatches` has every difference, the first one in `str`."""

    def __init__(self, mismatches: Sequence[Mismatch], peer: str = "") -> None:
        if not mismatches:
            raise ValueError("an IncompatibleError needs at least one mismatch")
        self.mismatches = tuple(mismatches)
        self.peer = peer
        more = f" (+{len(self.mismatches) - 1} more)" if len(self.mismatches) > 1 else ""
        where = f" at {peer}" if peer else ""
        super().__init__(f"incompatible peer{where}: {self.mismatches[0].text}{more}")


class DuplicateTransfer(PdlinkError):
    """A transfer id that another live request already uses."""


class NotReady(PdlinkError):
    """An instance whose registrations do not make its layer plans whole yet."""


class UnknownInstance(NotReady):
    """An instance that nobody has registered."""


class StaleIncarnation(PdlinkError):
    """A worker that speaks for a process which has been replaced."""


class AccessDenied(PdlinkError):
    """Someone who did not prove who they are: a token or a certificate that is missing, wrong or out of date."""


class NotOwner(AccessDenied):
    """A change to a registration by someone who did not make it."""


class StateError(PdlinkError):
    """A call that the object's state does not allow (publish after the last publish, a closed worker, ...)."""


class LimitReached(StateError):
    """A call that would exceed a bound: live transfers, linked peers, threads, open files. It names the bound."""


class PartDead(StateError):
    """A call on a part of this process whose thread has died. The message is why; nothing restarts it."""


class DeadlineExceeded(PdlinkError, TimeoutError):
    """A named wait that took longer than its setting allows."""


class IntegrityError(PdlinkError):
    """Bytes that are not what their owner wrote: a broadcast that moved nothing, ranks that disagree, a digest."""


class BackendError(PdlinkError):
    """A transport that failed to move bytes; the destination may hold anything."""


class BackendUnavailable(BackendError):
    """A transport that cannot be used here, with the reason and what to install or set."""


class PeerGone(BackendError):
    """A peer whose process or memory is no longer there."""


class RegionError(BackendError):
    """An address range that no registered region covers, or a region that this backend cannot serve."""


class TransferFailed(PdlinkError):
    """A request that ended FAILED or ABORTED; the message is its first failure."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One field on which two sides differ.

    `prefill` and `decode` are the two values as text, and `fix` says what to change. The same value travels in
    refusals, so both sides report it alike.
    """

    field: str
    prefill: str
    decode: str
    fix: str = ""

    @property
    def text(self) -> str:
        advice = f"; {self.fix}" if self.fix else ""
        return f"{self.field} is {self.prefill} on prefill and {self.decode} on decode{advice}"
