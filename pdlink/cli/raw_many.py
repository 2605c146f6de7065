"""Owns the baseline of several links at once: a pair of processes for each owner and reader, all of which read in one
moment; and each of the links alone, with one large range. The library's settings are those found best for one pair.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

from pdlink.cli.exits import WrongRun
from pdlink.cli.raw_rig import PAGES, RANGE, Pair, Places, RawRig, Read
from pdlink.cli.transfer_case import Case
from pdlink.cli.transfer_talk import answer, ask
from pdlink.testing.child import Child

ASK_TIMEOUT_S = 180.0
AHEAD_S = 0.05
"""How long before they begin all are told when: longer than it takes to tell them."""

Link: TypeAlias = tuple[int, int]
"""Of which owner, to which reader."""
Span: TypeAlias = tuple[float, float]
"""From when to when, in seconds of the clock that the processes of a host share."""


class RawMany:
    """The pairs of one case. Use `close` at the end; twice is fine.

    `cases` are one for each owner, with its layers; `paths` and `devices` are those of owners and of readers; `fillers`
    fill the owners' memory where pairs use that, else each pair has its own (None).
    """

    def __init__(
        self,
        cases: Sequence[Case],
        paths: tuple[Sequence[str], Sequence[str]],
        devices: tuple[Sequence[int], Sequence[int]],
        fillers: Sequence[Child | None],
    ) -> None:
        self._number = 0
        self._fillers = fillers
        places: dict[Link, Places] = {
            (owner, reader): {
                "paths": (paths[0][owner], paths[1][reader]),
                "devices": (devices[0][owner], devices[1][reader]),
            }
            for owner in range(len(cases))
            for reader in range(len(paths[1]))
        }
        search = RawRig(fillers[0])
        try:
            search.open(cases[0], places[0, 0])
            taken, large = search.taken[PAGES], search.taken[RANGE]
        finally:
            search.close()
        self.settings = {PAGES: str(taken), RANGE: str(large.read)}
        self._reads: Mapping[str, Read] = {PAGES: taken.read, RANGE: large.read}
        self._pairs: dict[Link, Pair] = {}
        with ExitStack() as starting:
            for link, place in places.items():
                case = cases[link[0]]
                pair = Pair(case, taken.option, fillers[link[0]])
                starting.callback(pair.close)
                pair.open(case, place, tuple(dict.fromkeys(self._reads.values())))
                self._pairs[link] = pair
            self._stack = starting.pop_all()

    def read_together(self, what: str, damage: bool = False) -> dict[Link, Span]:
        """When each link's read of `what` began and ended, all of them at once. Raises `WrongRun` for wrong bytes."""
        read, number = self._reads[what], self._next()
        pairs = self._pairs
        for pair in pairs.values():
            ask(pair.reader, ASK_TIMEOUT_S, "wipe")
        self._fill(number, damage)
        owners = [pair.owner for pair in pairs.values() if pair.owner]
        for owner in owners:
            owner.say({"do": "serve"})
        self._ask_all("warm", key=read.key)
        start_at = time.perf_counter() + AHEAD_S
        told = self._ask_all("read_at", key=read.key, number=number, cut=read.cut, start_at=start_at)
        for owner in owners:
            owner.say({"do": "rest"})
        for link, one in told.items():
            if one["wrong"]:
                raise WrongRun(f"{pairs[link].reader.name} brought other bytes than its owner holds: {one['wrong']}")
        return {link: (one["began"], one["ended"]) for link, one in told.items()}

    def read_alone_s(self, what: str) -> dict[Link, float]:
        """Seconds of each link's read of `what`, one link after another."""
        return {link: pair.read_s(self._reads[what], self._next()) for link, pair in self._pairs.items()}

    def close(self) -> None:
        self._stack.close()

    def _fill(self, number: int, damage: bool) -> None:
        """Where owners have one memory for all readers, once for each."""
        for (owner, reader), pair in self._pairs.items():
            if self._fillers[owner] is None or not reader:
                pair.fill(number, damage and not owner)

    def _ask_all(self, do: str, **arguments: object) -> dict[Link, dict[str, Any]]:
        for pair in self._pairs.values():
            pair.reader.say({"do": do, **arguments})
        return {link: answer(pair.reader, ASK_TIMEOUT_S) for link, pair in self._pairs.items()}

    def _next(self) -> int:
        self._number += 1
        return self._number
