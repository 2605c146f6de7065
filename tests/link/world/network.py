"""Owns what is on the wire between the owners and readers of a world: frames get lost, repeated, out of order, and come
again much later, at rates that each world draws for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdlink.control.frames import Frame

if TYPE_CHECKING:
    from tests.link.world.model import World
    from tests.link.world.reader import Reader

MAX_ON_WIRE = 40
REMEMBERED = 60


@dataclass(eq=False)
class Message:
    """A frame on its way to the owner `worker_id`, or from it back along `route`."""

    frame: Frame
    route: bytes
    worker_id: str
    to_owner: bool
    seen: tuple[float, int] = (0.0, 0)
    """When it was last delivered, and in which life of its owner."""


class Network:
    def __init__(self, world: World) -> None:
        self.world = world
        rng = world.rng
        self.loss = rng.choice([0.0, 0.02, 0.2])
        self.repeats = rng.choice([0.0, 0.05, 0.3])
        self.disorder = rng.choice([0.0, 0.3, 0.9])
        self.wire: list[Message] = []
        self.old: list[Message] = []
        """Frames that were on the wire, to come again much later."""

    def post(self, message: Message) -> None:
        self.wire.append(message)
        if len(self.wire) > MAX_ON_WIRE:
            self.wire.pop(0)

    def step(self) -> None:
        """One of the frames under way arrives, or is lost."""
        rng = self.world.rng
        number = rng.randrange(len(self.wire)) if rng.random() < self.disorder else 0
        if rng.random() < self.loss:
            self.wire.pop(number)
            return
        message = self.wire[number] if rng.random() < self.repeats else self.wire.pop(number)
        self.remember(message)
        self.deliver(message)

    def deliver(self, message: Message) -> None:
        frame = message.frame
        if message.to_owner:
            self.world.by_id[message.worker_id].loop.handler(message.route, frame)
            return
        for reader in self.world.readers:
            if reader.route(message.worker_id) == message.route:
                reader.hear(message.worker_id, frame)

    def remember(self, message: Message) -> None:
        world = self.world
        message.seen = (world.now, world.by_id[message.worker_id].lives)
        self.old.append(message)
        if len(self.old) > REMEMBERED:
            self.old.pop(world.rng.randrange(REMEMBERED))

    def reader_at(self, message: Message) -> Reader | None:
        return next((one for one in self.world.readers if one.route(message.worker_id) == message.route), None)
