"""Owns what goes wrong in a world beside its network: engines that change their minds, processes that end or stand
still, connections made anew, and frames that somebody has forged or kept.
"""

from __future__ import annotations

from pdlink.control.frames import Abort, Body, Credit, Frame, Stage
from pdlink.layout.readers import ReaderSet
from pdlink.transfer.failure import Failure, FailureReason
from tests.link.world.model import STEP_S, World
from tests.link.world.network import Message
from tests.link.world.owner import Owner
from tests.link.world.reader import Reader

MAX_READERS = 5


def fault(world: World) -> None:
    rng = world.rng
    dice = rng.random()
    if dice < 0.12:
        rng.choice(world.owners).withdraw(rng.choice(world.ids))
    elif dice < 0.2:
        sender = rng.choice(world.owners).senders.get(rng.choice(world.ids))
        if sender:
            sender.abort()
    elif dice < 0.26:
        restart(world, rng.choice(world.owners))
    elif dice < 0.32:
        rng.choice(world.readers).start()
    elif dice < 0.42:
        attempts = [one for reader in world.readers for one in reader.attempts]
        if attempts:
            one = rng.choice(attempts)
            one.merge.fail(Failure(FailureReason.ABORTED, "enough"), world.now)
            one.act()
    elif dice < 0.5:
        reader, owner = rng.choice(world.readers), rng.choice(world.owners)
        reader.connections[owner.worker_id] += 1
    elif dice < 0.75 and world.network.old:
        for _ in range(rng.randint(1, 4)):
            world.network.deliver(rng.choice(world.network.old))
    elif dice < 0.85:
        world.pass_time(rng.choice([2.0, 6.0, 16.0]))
    elif dice < 0.92:
        stop_some(world)
    else:
        world.network.deliver(forge(world))


def restart(world: World, owner: Owner) -> None:
    owner.restart()
    if world.rng.random() < 0.7:
        for reader in world.readers:
            for one in reader.attempts:
                if one.is_resolved:
                    one.merge.on_incarnation(owner.worker_id, owner.lives, world.now)
                    one.act()


def stop_some(world: World) -> None:
    """One side stands still while the other's clock goes on."""
    network = world.network
    stopped = world.rng.choice([*world.owners, *world.readers])
    if isinstance(stopped, Reader) and len(world.readers) < MAX_READERS and world.rng.random() < 0.7:
        # Somebody has started another process in its place; the first one will go on.
        world.readers.append(Reader(world, stopped.readers))
        for one in stopped.attempts:
            world.readers[-1].receive(one.transfer_id)
        for one in world.readers[-1].attempts:
            one.resolve()
    num_steps = world.rng.choice([20, 80, 280])
    for _ in range(num_steps):
        world.now += STEP_S
        for owner in world.owners:
            if owner is not stopped:
                owner.loop.run_due()
        for reader in world.readers:
            if reader is not stopped:
                reader.tick()
        for message in list(network.wire):
            to = world.by_id[message.worker_id] if message.to_owner else network.reader_at(message)
            if to is not stopped and message in network.wire:
                network.wire.remove(message)
                network.deliver(message)
    for one in stopped.attempts if isinstance(stopped, Reader) else ():
        one.merge.excuse(num_steps * STEP_S)


def forge(world: World) -> Message:
    """A frame of a kind that means something, from an attempt that does not exist."""
    rng = world.rng
    worker_id = rng.choice(world.owners).worker_id
    kind = rng.choice([Abort, Credit, Stage])
    readers = rng.choice(world.readers).readers
    body: Body
    if kind is Abort:
        body = Abort(Failure(FailureReason.ABORTED, "forged"), ReaderSet("nobody", 0, readers.num_readers))
    elif kind is Credit:
        body = Credit((rng.randrange(world.num_slots),), (rng.randrange(1 << 60),))
    else:
        body = Stage(1, 0, 0, 1, {"latent": (0,)})
    return Message(Frame(rng.choice(world.ids), 1 << 60, body), b"forged", worker_id, to_owner=True)
