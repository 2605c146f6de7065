"""Owns the prefill side of a scenario as the scenario sees it. What runs on that side is in `owner_process`."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pdlink.backends.base import Peer
from pdlink.layout.regions import MemoryKind, Region
from pdlink.testing.child import Child
from pdlink.testing.conformance.pool import TRANSFER
from pdlink.testing.conformance.setup import Setup

ANSWER_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Spec:
    """What an owner holds: `num_ranks` ranks, each with a backend and a pool of its own."""

    num_layers: int = 2
    num_pages: int = 32
    page_bytes: int = 4096
    gap: int = 0
    transfer_id: str = TRANSFER
    num_ranks: int = 1
    backwards: bool = False
    """Register the last layer first."""
    sparse: bool = False
    """Leave the gaps between pages alone, and have no guard pages: for gaps that are larger than memory."""
    exit_code: int = 0


class Owner:
    """The other process, as a scenario sees it. Its ranks are called `w0`, `w1`, ..."""

    def __init__(self, setup: Setup, spec: Spec, incarnation: int) -> None:
        self.spec = spec
        arguments = [setup.to_json(), json.dumps(asdict(spec))]
        self.process = Child("owner", "pdlink.testing.conformance.owner_process", arguments, setup.env)
        try:
            told = self.process.hear(setup.start_timeout_s)["ranks"]
        except BaseException:
            self.process.close()
            raise
        self.peers = tuple(
            Peer(f"w{number}", incarnation, base64.b64decode(one["endpoint"])) for number, one in enumerate(told)
        )
        self.rank_regions = tuple(_regions(one["regions"]) for one in told)

    @property
    def peer(self) -> Peer:
        return self.peers[0]

    @property
    def regions(self) -> tuple[Region, ...]:
        return self.rank_regions[0]

    def deregister(self) -> None:
        """Every rank takes its regions back from its backend. Their memory stays as it is."""
        self.process.ask(ANSWER_TIMEOUT_S, do="deregister")


def _regions(rows: Sequence[Mapping[str, Any]]) -> tuple[Region, ...]:
    return tuple(Region(**{**row, "memory": MemoryKind(row["memory"])}) for row in rows)
