"""Owns the man in the middle of the control frames, as a process: it repeats, reorders, loses and damages what passes.

Its first line of input names the sockets to stand before. It never reads a frame, and knows bytes only.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter, deque
from typing import Any

import zmq

from pdlink.testing.parent import Parent
from tests.faults.mutate import Damage, any_damage
from tests.faults.stranger import shout_at_bootstrap

KEPT = 256
POLL_MS = 20
IDLE_S = 2.0
"""Much longer than the pause between two signs of life of a reader."""


class Lane:
    """One prefill rank's: frames of any number of readers."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], at: str, target: str, poller: zmq.Poller) -> None:
        self.context, self.target, self.poller = context, target, poller
        self.server = context.socket(zmq.ROUTER)
        self.server.setsockopt(zmq.LINGER, 0)
        self.server.bind(f"tcp://{at}")
        poller.register(self.server, zmq.POLLIN)
        self.clients: dict[bytes, zmq.Socket[bytes]] = {}
        self.heard: dict[bytes, float] = {}

    def client(self, route: bytes) -> zmq.Socket[bytes]:
        if route not in self.clients:
            self.clients[route] = self.connect()
            self.poller.register(self.clients[route], zmq.POLLIN)
        self.heard[route] = time.monotonic()
        return self.clients[route]

    def sweep(self) -> None:
        """Close what no reader has used for a while: it has gone, and a ROUTER is told of no end."""
        for route in [route for route, when in self.heard.items() if time.monotonic() - when > IDLE_S]:
            del self.heard[route]
            socket = self.clients.pop(route)
            self.poller.unregister(socket)
            socket.close()

    def connect(self) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.connect(f"tcp://{self.target}")
        return socket


class Rule:
    """What becomes of the frames of one direction. Rates are of 1; `script` is damage to the next frames, in order."""

    def __init__(self) -> None:
        self.repeat = self.swap = self.lose = self.damage = 0.0
        self.script: deque[Damage] = deque()
        self.held: dict[bytes, bytes] = {}
        """Route -> the frame that waits for the next one to overtake it."""

    def apply(self, route: bytes, data: bytes, chance: random.Random) -> list[bytes]:
        if self.script:
            data = self.script.popleft().to(data)
        elif chance.random() < self.damage:
            data = any_damage(chance).to(data)
        if chance.random() < self.lose:
            return []
        out = [data] * (3 if chance.random() < self.repeat else 1)
        if (held := self.held.pop(route, None)) is not None:
            return [*out, held]
        if chance.random() < self.swap:
            self.held[route] = data
            return []
        return out


class Middleman:
    def __init__(self, parent: Parent, lanes: list[tuple[str, str]]) -> None:
        self.parent = parent
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.poller = zmq.Poller()
        self.lanes = [Lane(self.context, at, target, self.poller) for at, target in lanes]
        self.rules = {"prefill": Rule(), "decode": Rule()}
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self.chance = random.Random(0)
        self.num: Counter[str] = Counter()

    def run(self) -> None:
        self.poller.register(0, zmq.POLLIN)
        heard = b""
        while True:
            ready = dict(self.poller.poll(POLL_MS))
            if 0 in ready:
                data = os.read(0, 1 << 16)
                if not data:
                    return
                *lines, heard = (heard + data).split(b"\n")
                for line in lines:
                    self.do(json.loads(line))
            for number, lane in enumerate(self.lanes):
                if lane.server in ready:
                    self._to_prefill(number, lane)
                lane.sweep()
                for route, client in list(lane.clients.items()):
                    if client in ready:
                        self._to_decode(number, lane, route, client)

    def do(self, told: dict[str, Any]) -> None:
        match told["do"]:
            case "rule":
                self.chance.seed(told.get("seed", 0))
                for to, rates in told["rates"].items():
                    for name, rate in rates.items():
                        setattr(self.rules[to], name, rate)
            case "script":
                self.rules[told["to"]].script = deque(Damage(*one) for one in told["damage"])
            case "stranger":
                self._be_stranger(told["seed"], told["frames"])
            case "shout":
                for address in told["addresses"]:
                    self.num["refused"] += shout_at_bootstrap(address, random.Random(told["seed"]), told["calls"])
        self.parent.say({"re": told["n"], "num": dict(self.num)})

    def _to_prefill(self, number: int, lane: Lane) -> None:
        route, data = lane.server.recv_multipart()
        self.kept.append((number, data))
        for one in self.rules["prefill"].apply(b"%d" % number + route, data, self.chance):
            lane.client(route).send(one, zmq.NOBLOCK)
            self.num["prefill"] += 1

    def _to_decode(self, number: int, lane: Lane, route: bytes, client: zmq.Socket[bytes]) -> None:
        for one in self.rules["decode"].apply(b"%d" % number + route, client.recv(), self.chance):
            lane.server.send_multipart([route, one], zmq.NOBLOCK)
            self.num["decode"] += 1

    def _be_stranger(self, seed: int, num_frames: int) -> None:
        """From a socket of its own: frames that have passed, as they were and damaged, and such as never were."""
        chance = random.Random(seed)
        for lane in range(len(self.lanes)):
            socket = self.lanes[lane].connect()
            known = [data for number, data in self.kept if number == lane]
            for _ in range(num_frames):
                data = (
                    chance.choice(known)
                    if known and chance.random() < 0.8
                    else chance.randbytes(chance.randrange(1024))
                )
                parts = [any_damage(chance).to(data)] * (1 + (chance.random() < 0.1))
                socket.send_multipart(parts)
                self.num["strange"] += 1
            socket.close(1000)


def main() -> None:
    parent, who = Parent(), json.loads(sys.stdin.readline())
    middleman = Middleman(parent, [tuple(one) for one in who["lanes"]])
    parent.say({"ready": os.getpid()})
    middleman.run()


if __name__ == "__main__":
    main()
