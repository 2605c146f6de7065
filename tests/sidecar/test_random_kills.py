"""Engines and sidecars killed at random points: nothing is left of them, no wrong bytes come, the others serve on."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import LOOK_S, PATIENCE_S, wait_until
from tests.sidecar.crowd import Engine, Sidecar, wait_gone
from tests.sidecar.rig import NUM_PAGES, Rig, folder_for_sockets, is_gone, kill

pytestmark = [pytest.mark.backend("ipc"), pytest.mark.slow, pytest.mark.timeout(1500)]

NUM_KILLS = 50
VICTIMS = ("engine", "sidecar", "process")
FINAL = ("done", "failed", "aborted")


@pytest.fixture
def rig() -> Iterator[Rig]:
    with folder_for_sockets() as folder, contextlib.ExitStack() as stack:
        yield Rig(stack, Path(folder))


class Pair:
    """A prefill and a decode engine, each at a sidecar of its own, which die and come back."""

    def __init__(self, rig: Rig, dice: random.Random) -> None:
        self.rig = rig
        self.dice = dice
        self.sidecars = {role: Sidecar(rig, rig.folder / f"{role}.sock").start() for role in ("prefill", "decode")}
        self.engines = {role: Engine(rig, sidecar.path, role) for role, sidecar in self.sidecars.items()}
        for engine in self.engines.values():
            engine.wait_ready()
        self.numbers = itertools.count()

    def begin(self, name: str) -> tuple[list[int], list[int]]:
        """Start a request, half of which is published. A side that is away refuses it."""
        source, target = (self.dice.sample(range(NUM_PAGES), 6) for _ in range(2))
        self.engines["decode"].ask("receive", name, target)
        if "error" not in self.engines["prefill"].ask("open", name, source):
            self.engines["prefill"].ask("publish", name, source[:3])
        return source, target

    def end(self, name: str, target: list[int]) -> None:
        """See a request end, whichever way, before its pages are used again. What has come of it is right."""
        decode = self.engines["decode"]
        decode.ask("abort", name)
        assert wait_until(lambda: decode.ask("poll", name)["state"] in FINAL)
        if decode.ask("poll", name)["state"] == "done":
            assert decode.ask("check", name, target)["wrong"] == ""

    def kill(self, role: str, victim: str) -> None:
        engine, sidecar = self.engines[role], self.sidecars[role]
        serving = engine.wait_served()
        if victim == "engine":
            engine.kill()
            wait_gone(engine)
            self.engines[role] = Engine(self.rig, sidecar.path, role)
            self.engines[role].wait_ready()
        elif victim == "sidecar":
            sidecar.kill()
            assert wait_until(lambda: is_gone(serving))
            sidecar.start()
        else:
            kill(serving)
        assert wait_until(lambda: self.is_well(role))

    def is_well(self, role: str) -> bool:
        """Whether the engine is at its sidecar; asked by way of a request that it does not know, which is an answer."""
        return bool(self.engines[role].ask("health", "")["ok"])

    def serve(self) -> None:
        """One request from end to end. Decode may hear only from a request that fails that prefill came anew."""
        give_up = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up:
            name = f"served-{next(self.numbers)}"
            source, target = self.begin(name)
            self.engines["prefill"].ask("publish", name, source[3:], last=True)
            assert wait_until(lambda name=name: self.engines["decode"].ask("poll", name)["state"] in FINAL)
            ended = self.engines["decode"].ask("poll", name)
            if ended["state"] == "done":
                assert self.engines["decode"].ask("check", name, target)["wrong"] == ""
                return
            self.engines["prefill"].ask("abort", name)  # or it would keep its place for as long as a lease
            time.sleep(LOOK_S)
        raise AssertionError(f"no request was served after a kill: {ended}")


def test_nothing_leaks_and_the_survivors_serve_however_one_dies(rig: Rig) -> None:
    dice = random.Random(8)
    pair = Pair(rig, dice)
    pair.serve()
    for number in range(NUM_KILLS):
        role, victim = dice.choice(("prefill", "decode")), dice.choice(VICTIMS)
        name = f"hit-{number}"
        source, target = pair.begin(name)
        time.sleep(dice.uniform(0, 0.01))  # a random point
        if dice.random() < 0.5:
            pair.engines["prefill"].ask("publish", name, source[3:], last=True)
        pair.kill(role, victim)
        if (role, victim) != ("decode", "engine"):
            pair.end(name, target)
        pair.serve()
    for engine in pair.engines.values():
        engine.child.close()
        wait_gone(engine)
    for sidecar in pair.sidecars.values():
        sidecar.stop()
        assert sidecar.has_left_nothing()
