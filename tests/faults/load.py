"""Owns the requests of a cluster: it keeps some under way all the time, and writes down how each ends on every side."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

from tests.faults.cluster import Cluster
from tests.faults.shape import VERDICT_DEADLINE_S
from tests.faults.table import fold

CONCURRENCY = 3
MAX_PAGES = 12
MAX_GAP_S = 0.15
"""Between two chunks of one request, so that most of its life is in the middle."""
PAUSE_S = 0.05
"""Between the beginnings of two requests."""
PAUSE_AFTER_FAILURE_S = 0.3
"""Pages of a failed request are watched, and a reader that fails them quickly would soon have no others."""


@dataclass
class Request:
    """One request, as its driver sees it. `state` is "none" until decode says how it ended; "gone" if decode died."""

    name: str
    reader: str
    num_pages: int
    begun: float
    state: str = "none"
    ended: float = 0.0
    said: dict[str, Any] = field(default_factory=dict)
    """What decode said at its end."""
    before: dict[str, Any] | None = None
    later: dict[str, Any] | None = None
    senders: dict[str, str] = field(default_factory=dict)
    """Rank -> "none" until it says how it ended there; "gone" if the rank died."""

    @property
    def is_over(self) -> bool:
        return self.state != "none" and "none" not in self.senders.values()

    def row(self, injected: float) -> dict[str, Any]:
        """As a line of a soak has it."""
        when = (
            "during" if self.begun >= injected else ("before" if self.ended and self.ended < injected else "under way")
        )
        return {
            "id": self.name,
            "reader": self.reader,
            "pages": self.num_pages,
            "when": when,
            "before": self.before,
            "state": self.state,
            "ended_s": round(self.ended - max(injected, self.begun), 3) if self.ended else 0.0,
            "ends": self.said.get("ends", 0),
            "reason": self.said.get("reason", ""),
            "why": self.said.get("why", ""),
            "aux": self.said.get("aux"),
            "hashes": self.said.get("hashes"),
            "later": self.later,
            "senders": self.senders,
        }


class Load:
    """Requests over one cluster. `step` is to be called all the time."""

    def __init__(self, cluster: Cluster, chance: random.Random, prefix: str = "r") -> None:
        self.cluster, self.chance, self.prefix = cluster, chance, prefix
        self.concurrency = CONCURRENCY
        self.requests: dict[str, Request] = {}
        """Those that are not yet forgotten."""
        self._num_begun = 0
        self._next = 0.0
        cluster.on_said, cluster.on_died = self._on_said, self._on_died

    @property
    def under_way(self) -> list[Request]:
        return [one for one in self.requests.values() if one.state == "none"]

    def step(self) -> None:
        """Begin a request where there is room for one, and hear what processes say."""
        now = time.monotonic()
        able = [name for name in self.cluster.plan.readers if self.cluster.can_answer(name)]
        if able and now >= self._next and len(self.under_way) < self.concurrency:
            self._next = now + PAUSE_S
            self.begin(self.chance.choice(able))
        self.cluster.pump(0.005)

    def begin(self, reader: str, num_pages: int | None = None, gap_s: float | None = None) -> Request:
        """Ask one reader to receive, and every rank to publish."""
        self._num_begun += 1
        name = f"{self.prefix}{self._num_begun}"
        num_pages = num_pages or self.chance.randint(1, MAX_PAGES)
        chunks = 4 if gap_s else self.chance.randint(1, min(4, num_pages))
        gap_s = self.chance.uniform(0, MAX_GAP_S) if gap_s is None else gap_s
        one = self.requests[name] = Request(name, reader, num_pages, time.monotonic())
        self.cluster.tell(reader, do="receive", id=name, pages=num_pages)
        # Chunks of equal size: fewer where they do not come out even.
        size = -(-num_pages // chunks)
        for rank in self.cluster.plan.ranks:
            process = self.cluster.processes[rank]
            there = bool(process.ready) and not process.has_ended
            one.senders[rank] = "none" if there else "gone"
            if there:
                self.cluster.tell(rank, do="serve", id=name, pages=num_pages, chunks=-(-num_pages // size), gap_s=gap_s)
        return one

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.step()

    def run_nothing(self, seconds: float) -> None:
        """Listen only."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.cluster.pump()

    def drain(self, timeout_s: float = VERDICT_DEADLINE_S) -> bool:
        """Begin nothing until all is over on every side that can speak; whether it is."""
        give_up = time.monotonic() + timeout_s
        while any(not one.is_over for one in self.requests.values()):
            if time.monotonic() > give_up:
                return False
            self.cluster.pump()
        return True

    def keep(self) -> None:
        """Write down how the pages of requests under way look, and have their readers keep them."""
        for reader in self.cluster.plan.readers:
            answer = self.cluster.ask(reader, do="keep")
            for name, seen in (answer or {"live": {}})["live"].items():
                if name in self.requests:
                    self.requests[name].before = seen

    def settle(self) -> str:
        """Look at kept pages again and free them; what was touched outside of any request, in words."""
        touched = []
        for reader in self.cluster.plan.readers:
            answer = self.cluster.ask(reader, do="settle")
            if answer is None:
                continue
            for name, seen in answer["later"].items():
                if name in self.requests:
                    self.requests[name].later = seen
            if answer["touched"]:
                touched.append(f"{reader}: {answer['touched']}")
        for rank in self.cluster.plan.ranks:
            answer = self.cluster.ask(rank, do="settle")
            for name, state in (answer or {"states": {}})["states"].items():
                one = self.requests.get(name)
                if one and one.senders.get(rank) not in (state, "gone"):
                    touched.append(f"{rank}: {name} was {one.senders[rank]} and is {state}")
        return "; ".join(touched)

    def forget(self) -> list[list[Any]]:
        """Let go of requests that are over; what a line says of each: id, pages, state, folded hashes, aux."""
        over = [one for one in self.requests.values() if one.is_over]
        for one in over:
            del self.requests[one.name]
        return [
            [one.name, one.num_pages, one.state, fold(one.said.get("hashes") or {}), one.said.get("aux")]
            for one in over
        ]

    def _on_said(self, name: str, said: dict[str, Any]) -> None:
        one = self.requests.get(said.get("ended", ""))
        if one is None:
            return
        if name == one.reader:
            one.state, one.ended, one.said = said["state"], time.monotonic(), said
            if one.state != "done":
                self._next = one.ended + PAUSE_AFTER_FAILURE_S
        elif one.senders.get(name) == "none":
            one.senders[name] = said["state"]

    def _on_died(self, name: str) -> None:
        now = time.monotonic()
        for one in self.requests.values():
            if one.reader == name and one.state == "none":
                one.state, one.ended = "gone", now
            if one.senders.get(name) == "none":
                one.senders[name] = "gone"
