"""Owns the random lives of worlds: engines, packing, pulls, faults, the network and time take turns, until the end."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from pdlink.config import load_settings
from tests.link.world.ending import settle
from tests.link.world.faults import fault
from tests.link.world.model import World

SETTINGS = load_settings(
    {}, transfer_timeout_s=90.0, progress_timeout_s=20.0, publication_lease_s=60.0, verdict_ttl_s=8.0, max_transfers=100
)
"""Shorter than the defaults, so that what is forgotten some day is forgotten within a run."""


def walk(rng: random.Random, num_steps: int) -> World:
    """One random life of a world, from its first step to its end."""
    with world(rng) as made:
        for _ in range(num_steps):
            step(made)
            for owner in made.owners:
                owner.scribble()
        settle(made)
    return made


@contextmanager
def world(rng: random.Random) -> Iterator[World]:
    made = World(rng, SETTINGS if rng.random() < 0.5 else SETTINGS.model_copy(update={"verdict_ttl_s": 60.0}))
    try:
        yield made
    finally:
        made.close()


def step(world: World) -> None:
    """Somebody does something."""
    rng = world.rng
    if world.network.wire and rng.random() < world.delivered:
        world.network.step()
        return
    dice = rng.uniform(0.5, 1.0)
    if dice < 0.63:
        rng.choice(world.readers).advance(rng.choice(world.owners).worker_id)
    elif dice < 0.71:
        rng.choice(world.owners).pack()
    elif dice < 0.79:
        rng.choice(world.owners).publish(rng.choice(world.ids), rng.randint(1, 3))
    elif dice < 0.83:
        rng.choice(world.owners).open(rng.choice(world.ids))
    elif dice < 0.86:
        rng.choice(world.readers).receive(rng.choice(world.ids))
    elif dice < 0.90:
        unresolved = [one for reader in world.readers for one in reader.attempts if not one.is_resolved]
        if unresolved:
            rng.choice(unresolved).resolve()
    elif dice < 0.95:
        world.pass_time(rng.choice([0.05, 0.3, 0.6]))
    elif rng.random() < world.faults:
        fault(world)
