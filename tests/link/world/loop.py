"""Owns the control loop of a prefill worker without a thread: frames go to the world's network, and timers run out when
the world's clock passes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pdlink.address import Address
from pdlink.control.frames import Frame
from tests.link.world.network import Message

if TYPE_CHECKING:
    from tests.link.world.model import World


class Timer:
    def __init__(self, due: float, call: Callable[[], None]) -> None:
        self.due = due
        self.call = call

    def cancel(self) -> None:
        self.call = lambda: None


class QuietLoop:
    """What a prefill worker needs of a control loop, without a thread."""

    def __init__(self, world: World, worker_id: str) -> None:
        self.world = world
        self.worker_id = worker_id
        self.timers: list[Timer] = []
        self.handler: Callable[[bytes, Frame], None] = lambda route, frame: None
        self.address = Address("127.0.0.1", 1)

    def clock(self) -> float:
        return self.world.now

    def call_soon(self, call: Callable[[], None]) -> bool:
        call()
        return True

    def on_death(self, told: object) -> None:
        pass

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(self.world.now + delay_s, call))
        return self.timers[-1]

    def bind(self, address: Address, handler: Callable[[bytes, Frame], None], *rest: object) -> QuietLoop:
        self.handler = handler
        return self

    def send(self, route: bytes, frame: Frame) -> None:
        self.world.network.post(Message(frame, route, self.worker_id, to_owner=False))

    def close(self) -> None:
        self.handler = lambda route, frame: None

    def run_due(self) -> None:
        due = [one for one in self.timers if one.due <= self.world.now]
        self.timers = [one for one in self.timers if one.due > self.world.now]
        for one in due:
            one.call()
