"""Owns the processes of `pdlink bench control` and one measured request across them. It sums nothing up.

This process is the decode rank; the bootstrap service, the sidecar and each prefill rank are children.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

from pdlink.address import parse_address
from pdlink.cli.control_rank import (
    INSTANCE,
    NUM_PAGES,
    PAGE_SIZE,
    REGISTER_TIMEOUT_S,
    Start,
    make_layout,
    open_node,
    source_page,
)
from pdlink.cli.exits import WrongRun
from pdlink.decode.links import PrefillInstance
from pdlink.decode.receiver import Receiver
from pdlink.errors import DeadlineExceeded
from pdlink.testing.child import Child
from pdlink.testing.pattern import PatternPool

START_TIMEOUT_S = REGISTER_TIMEOUT_S + 10.0
REQUEST_TIMEOUT_S = 20.0
BUSY_S = 1e-3

Caller = Callable[[Receiver], None]


def call_wait(receiver: Receiver) -> None:
    """A thread that does nothing else."""
    receiver.wait(REQUEST_TIMEOUT_S)


def call_poll(receiver: Receiver) -> None:
    """A scheduler with nothing to schedule."""
    give_up = time.monotonic() + REQUEST_TIMEOUT_S
    while not receiver.poll().is_final:
        if time.monotonic() > give_up:
            raise DeadlineExceeded(f"{receiver.transfer_id} is {receiver.state} after {REQUEST_TIMEOUT_S:g} s")


def call_busy(receiver: Receiver) -> None:
    """A scheduler that holds the GIL for a millisecond of Python between two polls."""
    give_up = time.monotonic() + REQUEST_TIMEOUT_S
    while not receiver.poll().is_final:
        end = time.monotonic() + BUSY_S
        while time.monotonic() < end:
            pass
        if end > give_up:
            raise DeadlineExceeded(f"{receiver.transfer_id} is {receiver.state} after {REQUEST_TIMEOUT_S:g} s")


CALLERS: dict[str, Caller] = {"wait": call_wait, "poll-loop": call_poll, "busy": call_busy}


def _start_sidecar(stack: ExitStack) -> str:
    """A sidecar for as long as `stack` stands; returns its socket."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdlink-"))
    path = f"{folder}/sidecar.sock"
    stack.enter_context(Child("the sidecar", "pdlink.cli.control_sidecar", [path])).hear(START_TIMEOUT_S)
    return path


class Rig:
    """One prefill instance of `cp` ranks, and this decode rank. Use it with `with`; everything ends with it."""

    def __init__(self, cp: int, num_layers: int, *, beside: bool = False) -> None:
        """`beside`: with the link of every rank, this one's too, in a sidecar."""
        self._stack = ExitStack()
        self._numbers = itertools.count()
        layout = make_layout(num_layers)
        with ExitStack() as starting:
            bootstrap = starting.enter_context(Child("the bootstrap service", "pdlink.cli.control_bootstrap", []))
            address = str(bootstrap.hear(START_TIMEOUT_S))
            sidecar = _start_sidecar(starting) if beside else ""
            self._ranks = []
            for rank in range(cp):
                start = Start(cp, rank, num_layers, address, sidecar)
                name = f"prefill rank {rank}"
                child = Child(name, "pdlink.cli.control_rank", [start.to_json()])
                self._ranks.append(starting.enter_context(child))
            for child in self._ranks:
                child.hear(START_TIMEOUT_S)
            # Told first and waited for afterwards, they end at the same time.
            starting.callback(self._end_children)
            self._pool = PatternPool(layout, {one.name: one.layers for one in layout.components}, NUM_PAGES)
            starting.callback(self._pool.close)
            node = starting.enter_context(open_node(sidecar))
            self._worker = node.decode("decode", layout, self._pool.regions)
            self._prefill = PrefillInstance(INSTANCE, (parse_address(address),))
            self._stack = starting.pop_all()

    def measure_ms(self, caller: Caller) -> float:
        """Move one page of every layer; from the last rank's publish to when `caller` knows of the success.

        Raises `WrongRun` when the bytes that came are not those that were published.
        """
        number = next(self._numbers)
        transfer_id, page = f"request-{number}", source_page(number + 1)
        receiver = self._worker.receive(transfer_id, self._prefill, {"kv": [page]}, PAGE_SIZE)
        for child in self._ranks:
            child.say([transfer_id, number])
        caller(receiver)
        ended_ns = time.monotonic_ns()
        receiver.result()
        published_ns = max(int(str(child.hear(REQUEST_TIMEOUT_S))) for child in self._ranks)
        wrong = self._pool.find_wrong(transfer_id, {"kv": [page]})
        if wrong:
            raise WrongRun(f"{transfer_id} was a success, but {wrong} is not what was published")
        return (ended_ns - published_ns) / 1e6

    def _end_children(self) -> None:
        for child in self._ranks:
            child.close_input()

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
