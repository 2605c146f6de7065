"""Owns the measured rounds of `pdlink bench transfer`: pdlink's two processes of one link, its baseline beside them,
and the order in which they take turns. It sums nothing up.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from pdlink.cli.exits import WrongRun
from pdlink.cli.raw_rig import RawRig
from pdlink.cli.transfer_case import Case, environment
from pdlink.cli.transfer_gpus import Gpus
from pdlink.cli.transfer_talk import answer, ask
from pdlink.testing.child import Child

ASK_TIMEOUT_S = 180.0
WARM_UP = 1
NOTHING, PDLINK, RAW = "none", "pdlink", "raw"


@dataclass(frozen=True, slots=True)
class Measured:
    """The rounds of one case: what pdlink's reader told, and the seconds of what is measured of the baseline (see
    `raw_rig`), one of each per round; and the setting that each of these took.
    """

    pulls: list[dict[str, Any]]
    raw_s: dict[str, list[float]]
    settings: dict[str, str]


class Rig:
    """The processes of one link, for one case after another. Use it with `with`; everything ends with it."""

    def __init__(self, case: Case, gpus: Gpus | None) -> None:
        """`gpus` for cases of device cuda."""
        self.link = case.link
        self._number = 0
        self._devices = gpus.devices if gpus else (-1, -1)
        env = environment(case.backend, case.transport, case.device)
        with ExitStack() as starting:
            self._owner = starting.enter_context(Child("the owner", "pdlink.cli.transfer_owner", [], env))
            self._reader = starting.enter_context(Child("the reader", "pdlink.cli.transfer_reader", [], env))
            self._raw = RawRig(None if gpus else self._owner)
            starting.callback(self._raw.close)
            self._stack = starting.pop_all()

    def measure(self, case: Case, rounds: int, damage: str = NOTHING) -> Measured:
        """Measure one case, after warm-up rounds.

        Raises `Unavailable` when the backend does not work here, and `WrongRun` when other bytes came than were sent,
        or on another way than the case says.
        """
        paths = self._open(case)
        self._raw.open(case, {"devices": self._devices, "paths": paths})
        taken = self._raw.taken
        done = Measured([], {what: [] for what in taken}, {what: str(one) for what, one in taken.items()})
        turns = [PDLINK, *dict.fromkeys(self._raw.first_like(what) for what in taken)]
        for number in range(-WARM_UP, rounds):
            took: dict[str, Any] = {}
            first = number % len(turns)
            for turn in turns[first:] + turns[:first]:
                if turn == PDLINK:
                    took[turn] = self._pull(case, damage == PDLINK)
                else:
                    took[turn] = self._raw.read_s(turn, damage == RAW)
            if number >= 0:
                done.pulls.append(took[PDLINK])
                for what, seconds in done.raw_s.items():
                    seconds.append(took[self._raw.first_like(what)])
        self._raw.close_case()
        self._close_case()
        return done

    def _open(self, case: Case) -> tuple[str, str]:
        """Start both sides; returns where their memory is."""
        rest: dict[str, Any] = {"shape": case.shape, "settings": case.settings}
        own, other = self._devices
        told = ask(self._owner, ASK_TIMEOUT_S, "open", **rest, device=own)
        heard = ask(self._reader, ASK_TIMEOUT_S, "open", **rest, device=other, bootstrap=told["bootstrap"])
        return told["path"], heard["path"]

    def _pull(self, case: Case, damage: bool) -> dict[str, Any]:
        self._number += 1
        # The reader rests while its owner writes, as that of the baseline does.
        ask(self._reader, ASK_TIMEOUT_S, "wipe")
        ask(self._owner, ASK_TIMEOUT_S, "publish", number=self._number, damage=damage)
        told = ask(self._reader, ASK_TIMEOUT_S, "pull", number=self._number)
        if told["wrong"]:
            raise WrongRun(f"pdlink said success, and brought other bytes than its owner holds: {told['wrong']}")
        if told["ways"] != [case.way] or told["backends"] != [case.backend]:
            raise WrongRun(f"asked for {case}, and pages moved by {told['backends']} {told['ways']}")
        return told

    def _close_case(self) -> None:
        for child in (self._reader, self._owner):
            child.say({"do": "close"})
        for child in (self._reader, self._owner):
            answer(child, ASK_TIMEOUT_S)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
