"""Owns the two refusals that say more than an `IncompatibleError`. It decides nothing; `compat` and `directory` do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdlink.bootstrap.messages import Endpoint
from pdlink.errors import IncompatibleError, Mismatch


class IncompatibleInstance(IncompatibleError):
    """The service's refusal of a decode side: every mismatch, and the ranks that are to be told of it too."""

    def __init__(self, mismatches: Sequence[Mismatch], peer: str, endpoints: Iterable[Endpoint]) -> None:
        super().__init__(mismatches, peer)
        self.endpoints = tuple(endpoints)


class RegistrationConflict(IncompatibleError):
    """A registration that contradicts a live one of its instance.

    In `mismatches` the `prefill` value is the registered one and the `decode` value the refused one; `str` says so.
    """

    def __init__(self, mismatches: Sequence[Mismatch], peer: str, text: str) -> None:
        super().__init__(mismatches, peer)
        self.args = (text,)
