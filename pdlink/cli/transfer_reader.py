"""Owns the decode side of `pdlink bench transfer`, as a process of its own: it receives requests and checks the bytes.

The times are those that pdlink itself reports of a pull (the event `pull.end`), and of the request as its caller sees
it.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from pdlink.address import parse_address
from pdlink.cli.transfer_bytes import Shape
from pdlink.cli.transfer_memory import GROUP, PAGE_SIZE, Pool, make_layout, open_pool
from pdlink.cli.transfer_owner import INSTANCE, request_names
from pdlink.cli.transfer_talk import converse
from pdlink.config import load_settings
from pdlink.decode.links import PrefillInstance
from pdlink.decode.receiver import ReceiveResult
from pdlink.events import Event
from pdlink.runtime.node import Node

REQUEST_TIMEOUT_S = 120.0
PHASES = ("took_s", "prep_s", "post_s", "pack_s", "wire_s", "unpack_s", "head_s", "tail_s")


class Reader:
    """The decode rank of one case at a time."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._pool: Pool | None = None
        self._pulls: list[dict[str, Any]] = []

    def open(
        self, shape: list[Any], settings: dict[str, Any], device: int, bootstrap: str, reader: int = 0
    ) -> dict[str, Any]:
        """Start a decode rank that pulls from the instance at `bootstrap`, requests of number `reader` of several such
        ranks; returns where its memory is."""
        self._reader = reader
        with ExitStack() as starting:
            self._shape = Shape(*shape)
            pool = self._pool = open_pool(self._shape, device)
            starting.callback(pool.close)
            node = starting.enter_context(Node(load_settings(**settings)))
            node.events.subscribe(self._on_event)
            self._worker = node.decode(f"decode-{reader}", make_layout(self._shape), pool.regions)
            self._prefill = PrefillInstance(INSTANCE, (parse_address(bootstrap),))
            self._stack = starting.pop_all()
        return {"path": pool.path}

    def wipe(self) -> dict[str, Any]:
        """Make every byte wrong."""
        assert self._pool is not None
        self._pool.block.wipe()
        return {}

    def pull(self, number: int) -> dict[str, Any]:
        """Receive request `number`, right after one like it that is not measured: a server under load does not come
        from sleep either, and cores that do take several times as long. Raises `TransferFailed` with the cause.
        """
        assert self._pool is not None
        self.warm(number)
        request_s, result = self._receive(number, warm=False)
        (pull,) = self._pulls
        return {
            **{name: pull[name] for name in (*PHASES, "num_posted", "num_descriptors")},
            "request_s": request_s,
            "ways": sorted({way for ways in result.ways.values() for way in ways}),
            "backends": sorted(set(result.backends.values())),
            "wrong": self._pool.block.find_wrong_page(number),
        }

    def warm(self, number: int) -> dict[str, Any]:
        """Receive the request before it that is not measured."""
        assert self._pool is not None
        self._receive(number, warm=True)
        if not self._shape.scattered:
            self._pool.block.wipe()  # the same pages once more
        return {}

    def pull_at(self, number: int, start_at: float) -> dict[str, Any]:
        """Receive request `number` from all owners, not before `start_at` of the clock that all processes share."""
        assert self._pool is not None
        time.sleep(max(0.0, start_at - time.perf_counter()))
        request_s, result = self._receive(number, warm=False)
        return {
            "spans": [(pull["ended"] - pull["took_s"], pull["ended"], pull["num_bytes"]) for pull in self._pulls],
            "request_s": request_s,
            "ways": sorted({way for ways in result.ways.values() for way in ways}),
            "backends": sorted(set(result.backends.values())),
            "wrong": self._pool.block.find_wrong_page(number),
        }

    def _receive(self, number: int, *, warm: bool) -> tuple[float, ReceiveResult]:
        """Seconds of one request, as its caller sees it, and its result."""
        num_tokens = self._shape.num_pages * PAGE_SIZE
        ((_, name),) = (one for one in request_names(number, self._reader) if one[0] == warm)
        target = {GROUP: self._shape.pages(warm)[1]}
        self._pulls.clear()
        began = time.perf_counter()
        result = self._worker.receive(name, self._prefill, target, num_tokens).wait(REQUEST_TIMEOUT_S)
        return time.perf_counter() - began, result

    def close(self) -> dict[str, Any]:
        self._stack.close()
        self._pool = None
        return {}

    def _on_event(self, event: Event) -> None:
        if event.name == "pull.end":
            self._pulls.append({**event.fields, "ended": time.perf_counter()})


if __name__ == "__main__":
    converse(Reader())
