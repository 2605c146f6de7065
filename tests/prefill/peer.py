"""Owns a decode side made of bare frames, for what a real one would never send, and a prefill worker to send it to."""

from __future__ import annotations

import contextlib
import itertools
import queue
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from pdlink.backends.ipc import IpcBackend
from pdlink.config import Settings, load_settings
from pdlink.control.frames import Body, Frame, Ping, Pong
from pdlink.control.loop import ControlLoop
from pdlink.events import Events
from pdlink.layout.layer_plan import PlanKind
from pdlink.layout.parallel import ParallelSizes, RankCoordinates
from pdlink.prefill.rank import PrefillRank
from pdlink.prefill.worker import PrefillWorker
from tests.prefill.rig import INCARNATION, LAYOUT, OWNED, regions

BodyT = TypeVar("BodyT")
TIMEOUT_S = 60.0


class Peer:
    """One connection to a worker. `collect` returns what has been answered to all that was sent before."""

    def __init__(self, loop: ControlLoop, worker: PrefillWorker) -> None:
        self._frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._channel = loop.connect(worker.control_endpoint, self._frames.put)
        self._nonces = itertools.count(1)

    def send(self, attempt: int, body: Body, transfer_id: str = "t") -> None:
        self._channel.send(Frame(transfer_id, attempt, body))

    def collect(self) -> list[Frame]:
        """All frames up to the answer to a ping: the worker has handled, and answered, whatever came before it."""
        nonce = next(self._nonces)
        self._channel.send(Frame("", 0, Ping(nonce)))
        frames = []
        while not isinstance((frame := self._frames.get(timeout=TIMEOUT_S)).body, Pong) or frame.body.nonce != nonce:
            frames.append(frame)
        return frames

    def answers(self, kind: type[BodyT], attempt: int | None = None) -> list[BodyT]:
        """The bodies of one kind among `collect`'s frames."""
        return [one.body for one in self.collect() if isinstance(one.body, kind) and attempt in (None, one.attempt)]

    def next(self) -> Frame:
        """The next frame, for when no ping is answered any more."""
        return self._frames.get(timeout=TIMEOUT_S)

    def ask(self, attempt: int, body: Body, transfer_id: str = "t") -> list[Body]:
        """Send one frame and return the bodies that came back."""
        self.send(attempt, body, transfer_id)
        return [one.body for one in self.collect()]


@dataclass
class Desk:
    """A worker and its loop. Regions are made up, so nothing may pull from it."""

    loop: ControlLoop
    worker: PrefillWorker
    events: Events
    seen: list[str] = field(default_factory=list)

    def peer(self) -> Peer:
        return Peer(self.loop, self.worker)


@contextlib.contextmanager
def desk(settings: Settings | None = None) -> Iterator[Desk]:
    events = Events()
    loop = ControlLoop(events=events).start()
    rank = PrefillRank(
        "pre",
        LAYOUT,
        ParallelSizes(cp=2),
        RankCoordinates(),
        {one.name: PlanKind.SPLIT for one in LAYOUT.components},
        OWNED,
        list(regions(OWNED).values()),
        incarnation=INCARNATION,
    )
    worker = PrefillWorker(rank, settings or load_settings({}), loop, {"ipc": IpcBackend()}, events)
    made = Desk(loop, worker, events)
    events.subscribe(lambda event: made.seen.append(event.name))
    try:
        yield made
    finally:
        worker.close()
        loop.close()
        assert loop.counters.handler_errors == 0
