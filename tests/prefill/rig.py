"""Owns what the prefill tests share: a rank without memory, a clock that is set, and the frames that were sent."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from pdlink.bootstrap.messages import PROTOCOL
from pdlink.control.frames import Body, PageSpan, Ready, Release, Subscribe, Verdict
from pdlink.layout.components import CacheLayout, index_k, latent
from pdlink.layout.fingerprint import fingerprint
from pdlink.layout.readers import ReaderSet
from pdlink.layout.regions import Region
from pdlink.prefill.chunk import RankFacts
from pdlink.prefill.sender import Sender

BodyT = TypeVar("BodyT")
PAGE_SIZE = 64
NUM_PAGES = 16
LEASE_S = 30.0
LIVENESS_S = 15.0
INCARNATION = 7
SOLO = ReaderSet("dec")
FIRST, SECOND = ReaderSet("dec", 0, 2), ReaderSet("dec", 1, 2)
STRANGER = ReaderSet("other", 0, 1)
LAYOUT = CacheLayout(4, (latent(PAGE_SIZE, range(4), bytes_per_token=656), index_k(PAGE_SIZE, range(4))))
OWNED = {"latent": (0, 1), "index_k": (0, 1)}


def regions(owned: dict[str, tuple[int, ...]]) -> dict[tuple[str, int], Region]:
    """Regions at made-up addresses: nothing here reads memory."""
    made = {}
    for number, (name, layer) in enumerate((name, layer) for name, ids in owned.items() for layer in ids):
        nbytes = LAYOUT.component(name).page_bytes
        made[name, layer] = Region(name, layer, (number + 1) << 24, nbytes, nbytes, NUM_PAGES)
    return made


def facts(owned: dict[str, tuple[int, ...]] | None = None, *, is_aux_owner: bool = True) -> RankFacts:
    owned = OWNED if owned is None else owned
    return RankFacts(
        "pre/r0",
        INCARNATION,
        LAYOUT,
        owned,
        regions(owned),
        is_aux_owner,
        64 << 10,
        LEASE_S,
        LIVENESS_S,
        None,
        itertools.count(1),
    )


def subscribe(readers: ReaderSet, next_sequence: int = 0, spans: tuple[PageSpan, ...] = ()) -> Subscribe:
    return Subscribe(PROTOCOL, fingerprint(LAYOUT).digest, readers, INCARNATION, spans, next_sequence)


@dataclass
class Rig:
    """A sender, its clock, and what it sent: (route, attempt, body)."""

    rank: RankFacts = field(default_factory=facts)
    now: float = 100.0
    sent: list[tuple[bytes, int, Body]] = field(default_factory=list)
    waiting: list[Sender] = field(default_factory=list)
    """Senders that asked for somebody to look at device events: the test does."""
    on_send: Callable[[Body], None] | None = None
    """Called while a frame leaves."""
    sender: Sender = field(init=False)

    def __post_init__(self) -> None:
        self.sender = Sender("t", self.rank, self._send, lambda: self.now, wait_for=self.waiting.append)

    def _send(self, route: bytes, attempt: int, body: Body) -> None:
        self.sent.append((route, attempt, body))
        if self.on_send:
            self.on_send(body)

    def take(self, kind: type[BodyT], attempt: int | None = None) -> list[BodyT]:
        """The bodies of one kind that were sent, to one attempt when given; they are forgotten."""
        chosen = [one for one in self.sent if isinstance(one[2], kind) and attempt in (None, one[1])]
        self.sent = [one for one in self.sent if one not in chosen]
        return [body for _, _, body in chosen if isinstance(body, kind)]

    def subscribe(
        self, attempt: int, readers: ReaderSet = SOLO, next_sequence: int = 0, spans: tuple[PageSpan, ...] = ()
    ) -> None:
        self.sender.on_subscribe(b"route%d" % attempt, attempt, subscribe(readers, next_sequence, spans))

    def release(self, attempt: int, pulled: dict[int, int] | None = None, readers: ReaderSet = SOLO) -> Verdict:
        return self.sender.on_release(b"route%d" % attempt, attempt, Release(readers, pulled or {}))


def generations(frames: list[Ready]) -> dict[int, int]:
    return {one.sequence: one.generation for one in frames}


def published(rig: Rig, attempt: int = 1, readers: ReaderSet = SOLO) -> dict[int, int]:
    """Subscribe, publish two chunks, and return what the reader would release."""
    rig.subscribe(attempt, readers)
    rig.sender.publish([3, 1])
    rig.sender.publish([2], last=True, aux=b"tok")
    return generations(rig.take(Ready, attempt))
