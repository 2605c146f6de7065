"""Owns one pull as it is handed to a puller, what is told of it, and how it ended. It moves nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from pdlink.decode.actions import Pull
from pdlink.decode.stage_inbox import Send
from pdlink.layout.regions import Region
from pdlink.transfer.ahead import Ahead, ahead_ticket
from pdlink.transfer.failure import Failure
from pdlink.transfer.timings import PullTimings


@dataclass(frozen=True, slots=True, eq=False)
class PullJob:
    """A pull to make, of the attempt `key` (transfer id, attempt). `stop` is set when its request is draining.

    `send` takes frames about the request to its owner. `ahead` is what the owner stages of it unasked.

    On the thread that pulls, `failing` is called when it has gone wrong but bytes may still land, and `done` once, when
    it is quiet.
    """

    pull: Pull
    regions: tuple[Region, ...]
    stop: threading.Event
    failing: Callable[[Failure], None]
    done: Callable[[Failure | None], None]
    key: tuple[str, int]
    send: Send
    ahead: Ahead | None = None

    def tickets_ahead(self) -> list[int]:
        """The tickets of what is staged unasked."""
        num_pieces = self.ahead.num_pieces if self.ahead else 0
        return [ahead_ticket(self.pull.sequence, index) for index in range(num_pieces)]

    def facts(self, worker_id: str, backend: str, way: str, timings: PullTimings) -> dict[str, object]:
        """What whoever listens is told of it. `num_cells` are pages x layers, and `num_descriptors` what they were
        merged into for the direct way."""
        return {
            "transfer_id": self.key[0],
            "attempt": self.key[1],
            "worker_id": worker_id,
            "backend": backend,
            "way": way,
            "num_cells": len(self.pull.rows) * len(self.pull.pages),
            "num_descriptors": self.pull.batch.num_descriptors,
            "num_posted": timings.num_posted,
            "prep_s": timings.prep_s,
            "post_s": timings.post_s,
            "pack_s": timings.pack_s,
            "wire_s": timings.wire_s,
            "unpack_s": timings.unpack_s,
            "head_s": timings.head_s,
            "tail_s": timings.tail_s,
            "verify_s": timings.verify_s,
        }


@dataclass(frozen=True, slots=True)
class PullEnd:
    """How a pull has ended: what its request hears, and the call that tells whoever listens to events."""

    failure: Failure | None
    tell: Callable[[], None] = lambda: None
