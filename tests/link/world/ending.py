"""Owns the end of a world: everybody does their part from now on, and then nothing may be left, nor come back."""

from __future__ import annotations

from pdlink.control.frames import Subscribe
from pdlink.prefill.sender import Sender
from tests.link.world.model import STEP_S, World
from tests.link.world.network import Message


def settle(world: World) -> None:
    """All ends within the sum of the deadlines, and nothing is left."""
    settings, network = world.settings, world.network
    for reader in world.readers:
        for one in reader.attempts:
            one.resolve()
    longest = settings.transfer_timeout_s + settings.publication_lease_s + settings.confirm_timeout_s + 30
    end = world.now + longest
    while world.now < end and not is_over(world):
        for _ in range(200):
            moved = bool(network.wire)
            if network.wire:
                network.deliver(network.wire.pop(0))
            for owner in world.owners:
                moved |= owner.pack()
                moved |= any(reader.advance(owner.worker_id) for reader in world.readers)
            if not moved:
                break
        world.pass_time(STEP_S)
    world.pass_time(2.0)
    look(world)
    haunt(world)
    world.pass_time(2.0)
    look(world)


def is_over(world: World) -> bool:
    attempts = all(one.merge.is_settled for reader in world.readers for one in reader.attempts)
    senders = all(holds_nothing(sender) for owner in world.owners for sender in owner.senders.values())
    return attempts and senders and not world.network.wire


def holds_nothing(sender: Sender) -> bool:
    return sender.poll().is_final or sender.publication(0) is None


def haunt(world: World) -> None:
    """Frames of what is over come again: they change and make nothing."""
    before = states(world)
    for message in list(world.network.old):
        when, life = message.seen
        is_known = world.now - when < world.settings.verdict_ttl_s and life == world.by_id[message.worker_id].lives
        if is_known and not (isinstance(message.frame.body, Subscribe) and may_begin(world, message)):
            world.network.deliver(message)
    world.network.wire.clear()
    now = states(world)
    assert now == before, [pair for pair in zip(before, now, strict=True) if pair[0] != pair[1]]


def may_begin(world: World, message: Message) -> bool:
    """A request that has published nothing, or that its engine has not opened again, may be subscribed to."""
    sender = world.by_id[message.worker_id].senders.get(message.frame.transfer_id)
    return sender is None or not sender.poll().is_final


def states(world: World) -> list[object]:
    senders = [(id(one), one.poll()) for owner in world.owners for one in owner.senders.values()]
    return senders + [(one.number, one.merge.state) for reader in world.readers for one in reader.attempts]


def look(world: World) -> None:
    for reader in world.readers:
        for one in reader.attempts:
            assert one.merge.state.is_final, f"attempt {one.number} is {one.merge.state}"
            assert one.merge.is_settled, f"attempt {one.number} still speaks"
        for worker_id, inbox in reader.inboxes.items():
            assert not inbox._answers, f"answers of {worker_id} are still expected: {inbox._answers}"
    for owner in world.owners:
        for sender in owner.senders.values():
            assert holds_nothing(sender), f"{owner.worker_id} is {sender.poll()} for ever"
        while owner.pack():
            pass
        assert owner.arena.slots.num_free == world.num_slots, f"{owner.worker_id} has lost a slot"
        stage = owner.worker._desk._stager
        assert stage is None or not stage._readings
