"""Owns the translation of errors and mismatches, so that the other end raises what this end refused. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from pdlink import errors
from pdlink.bootstrap import wire
from pdlink.bootstrap.refusals import RegistrationConflict
from pdlink.errors import IncompatibleError, Mismatch, PdlinkError
from pdlink.v1 import common_pb2 as pb

MAX_MISMATCHES = 64


def pack_mismatches(mismatches: Sequence[Mismatch]) -> list[pb.Mismatch]:
    """The first ones, each clipped: enough to act on, and bounded whatever differs."""
    return [
        pb.Mismatch(
            field=wire.clip(one.field),
            prefill=wire.clip(one.prefill),
            decode=wire.clip(one.decode),
            fix=wire.clip(one.fix),
        )
        for one in mismatches[:MAX_MISMATCHES]
    ]


def unpack_mismatches(messages: Sequence[pb.Mismatch]) -> tuple[Mismatch, ...]:
    wire.bounded("mismatches", len(messages), MAX_MISMATCHES)
    return tuple(Mismatch(_line(one.field), _line(one.prefill), _line(one.decode), _line(one.fix)) for one in messages)


_CONFLICTS = (IncompatibleError, RegistrationConflict)
_KINDS: dict[str, type[PdlinkError]] = {
    one.__name__: one
    for one in vars(errors).values()
    if isinstance(one, type) and issubclass(one, PdlinkError) and one not in _CONFLICTS
}


def pack_error(error: PdlinkError) -> pb.ErrorDetail:
    """`error` for the other end; a class that the wire does not know travels as its nearest known base."""
    known = (*_KINDS, *(one.__name__ for one in _CONFLICTS))
    kind = next(one.__name__ for one in type(error).__mro__ if one.__name__ in known)
    detail = pb.ErrorDetail(kind=kind, text=wire.clip(str(error)))
    if isinstance(error, IncompatibleError):
        detail.peer = wire.clip(error.peer, 256)
        # Error details ride in headers, which hold a few KiB; refusals in a message body carry all mismatches.
        detail.mismatches.extend(
            pb.Mismatch(
                field=wire.clip(one.field, 128),
                prefill=wire.clip(one.prefill, 256),
                decode=wire.clip(one.decode, 256),
                fix=wire.clip(one.fix, 128),
            )
            for one in error.mismatches[:4]
        )
    return detail


def unpack_error(detail: pb.ErrorDetail) -> PdlinkError:
    """The error that the other end raised, of the same class where this build has it."""
    text = _line(detail.text) or "refused without a reason"
    mismatches = unpack_mismatches(detail.mismatches)
    if mismatches and detail.kind == RegistrationConflict.__name__:
        return RegistrationConflict(mismatches, _line(detail.peer), text)
    if mismatches and detail.kind == IncompatibleError.__name__:
        return IncompatibleError(mismatches, _line(detail.peer))
    return _KINDS.get(detail.kind, PdlinkError)(text)


def _line(text: str) -> str:
    """One bounded line, safe to print."""
    shown = wire.clip(text)
    return shown if shown.isprintable() else "".join(one if one.isprintable() else "?" for one in shown)
