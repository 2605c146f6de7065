"""Owns the network between workers of one process: frames as bytes, in one queue that whoever waits works off.

No sockets and no I/O thread: everything but packing and pulling, which have threads of their own where they take them,
runs on the thread that waits. Frames cross it encoded, as on a wire.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pdlink.address import Address
from pdlink.backends.base import Backend, Capabilities, Peer, PullHandle, PullStatus, Settled
from pdlink.backends.host_copy import copy
from pdlink.control.frames import Frame
from pdlink.control.wire import decode, encode
from pdlink.layout.regions import MemoryKind, Region
from pdlink.transfer.descriptors import PullBatch

PATIENCE_S = 120.0


class Network:
    """The queue, and who listens where."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.listening: dict[int, Callable[[bytes, Frame], None]] = {}
        self.channels: dict[bytes, Callable[[Frame], None]] = {}

    def wait(self, holds: Callable[[], bool]) -> None:
        """Work until `holds`. Fails when nothing has happened for long: what waits for a thread waits for a machine."""
        happened = time.monotonic()
        while not holds():
            try:
                self.calls.get(timeout=0.5)()
                happened = time.monotonic()
            except queue.Empty:
                assert time.monotonic() < happened + PATIENCE_S, "nothing happens any more"

    def drain(self) -> None:
        while not self.calls.empty():
            self.calls.get()()


class QuietLoop:
    """What workers need of a control loop. Its clock stands still: nothing is overdue and nothing is repeated."""

    death = None

    def __init__(self, network: Network) -> None:
        self.network = network

    def clock(self) -> float:
        return 1000.0

    def on_death(self, told: object) -> None:
        pass

    def call_later(self, delay_s: float, call: object) -> Any:
        return SimpleNamespace(cancel=lambda: None)

    def call_soon(self, call: Callable[[], None]) -> bool:
        self.network.calls.put(call)
        return True

    def bind(self, address: Address, handler: Callable[[bytes, Frame], None], keys: object = None) -> Any:
        port = 1 + len(self.network.listening)
        self.network.listening[port] = handler

        def send(route: bytes, frame: Frame) -> None:
            data = encode(frame)
            self.network.calls.put(lambda: self.network.channels[route](decode(data)))

        return SimpleNamespace(address=Address("127.0.0.1", port), send=send, close=lambda: None)

    def connect(self, address: Address, heard: Callable[[Frame], None], keys: object = None) -> Any:
        route = b"%d" % len(self.network.channels)
        self.network.channels[route] = heard

        def send(*frames: Frame) -> None:
            for data in [encode(frame) for frame in frames]:
                self.network.calls.put(lambda data=data: self.network.listening[address.port](route, decode(data)))

        return SimpleNamespace(address=address, send=send, close=lambda: None)


class Here(Backend):
    """Copies within this process, descriptor by descriptor, when it is polled."""

    name = "here"
    capabilities = Capabilities(
        frozenset({MemoryKind.HOST}), works_in_poll=True, cost_per_descriptor_s=2e-6, bytes_per_s=5e9
    )

    def register(self, region: Region) -> None:
        pass

    def deregister(self, region: Region) -> None:
        pass

    def endpoint(self) -> bytes:
        return b"here"

    def connect(self, peer: Peer) -> None:
        pass

    def disconnect(self, peer: Peer) -> None:
        pass

    def submit(self, batch: PullBatch) -> PullHandle:
        return PullHandle(batch)

    def poll(self, handle: PullHandle) -> PullStatus:
        copy(handle.batch, lambda: False)
        return PullStatus.DONE

    def settle(self, handle: PullHandle) -> Settled:
        return Settled.QUIET

    def fence(self, peer: Peer) -> tuple[str, ...]:
        return (peer.worker_id,)

    def close(self) -> None:
        pass
