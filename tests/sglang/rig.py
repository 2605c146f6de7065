"""Owns a prefill deployment and a decode rank of the real sglang as a test drives them: start, one request, end."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.sglang.nursery import Nursery
from tests.sglang.talk import Child, ask_all

FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)
MODULE = "tests.sglang.rank_process"
# Short waits, where a test is about one that runs out; the rest of it is what users get.
ENVIRON = {
    "PDLINK_LIVENESS_TIMEOUT_S": "3",
    "PDLINK_KEEPALIVE_INTERVAL_S": "1",
    "PDLINK_REGISTRATION_LEASE_S": "3",
}


@dataclass
class Rig:
    """`num_ranks` CP ranks of prefill and `num_decode` TP ranks of decode, each a process. `close` ends all."""

    nursery: Nursery
    folder: Path
    num_ranks: int
    num_layers: int
    prefill_backend: str = "pdlink"
    decode_backend: str = "pdlink"
    environ: Mapping[str, str] = field(default_factory=dict)
    prefill_environ: Mapping[str, str] = field(default_factory=dict)
    decode_environ: Mapping[str, str] = field(default_factory=dict)
    num_decode: int = 1
    rooms: int = 1000

    def __post_init__(self) -> None:
        self.port = free_port()
        gloo = free_port()
        common = {**ENVIRON, **self.environ}
        self.prefill = [
            self._child("prefill", rank, self.num_ranks, gloo, self.prefill_backend, common | self.prefill_environ)
            for rank in range(self.num_ranks)
        ]
        gloo = free_port()
        self.decodes = [
            self._child("decode", rank, self.num_decode, gloo, self.decode_backend, common | self.decode_environ)
            for rank in range(self.num_decode)
        ]
        self.decode = self.decodes[0]
        self.prefill[0].do("serve_bootstrap")

    def start(self, transports: str, **values: Any) -> list[dict[str, Any]]:
        """(Re)make every manager over these transports; what each prefill rank says of itself."""
        told = ask_all(self.prefill, "start", transports=transports, **values)
        ask_all(self.decodes, "start", transports=transports, **values)
        return told

    def room(self) -> int:
        self.rooms += 1
        return self.rooms

    def close(self) -> None:
        for child in (*self.decodes, *self.prefill):
            child.close()

    def open(self, room: int) -> None:
        """Both sides begin with the request, up to the point where decode knows the prefill server."""
        ask_all(self.prefill, "open", room=room)
        assert all(ask_all(self.decodes, "ensure", bootstrap_port=self.port))
        assert set(ask_all(self.decodes, "open", room=room, bootstrap_port=self.port)) == {WAITING}

    def _child(self, role: str, rank: int, ranks: int, gloo: int, backend: str, environ: Mapping[str, str]) -> Child:
        log = self.folder / f"{role}{rank}.log"
        return Child(self.nursery, MODULE, log, environ, role, rank, ranks, self.num_layers, gloo, self.port, backend)


def free_port() -> int:
    """A port that nobody listens on. Below those that the kernel gives out by itself, which another process could be
    given before this one is bound."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
