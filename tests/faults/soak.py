"""Owns the soak: random faults on running clusters for as long as is asked, one line of JSON for each, from a seed.

    python -m tests.faults.soak --minutes 15 --seed 1 --out soak.jsonl

A cluster lives for `ROUND_S`, less in a short soak, then another backend or way has its turn. `table` says what the
lines come to.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from pdlink.cli.progress import Steps, progress
from tests.faults import episode
from tests.faults.cluster import Plan, running
from tests.faults.hosts import loopback, namespaces, namespaces_missing
from tests.faults.kinds import FAULTS, Fault
from tests.faults.load import Load
from tests.link.transports import TRANSPORTS

ROUND_S = 55.0
BACKENDS = ("ipc", "nixl-tcp", "mooncake-tcp", "nixl-cma")
WAYS = ("direct", "staged")
FIRST = {"line": "header", "version": 1}


class Deck:
    """Every fault once in random order, then again: in a short run too, none is left out by chance."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.cards: list[Fault] = []

    def draw(self, can_cut: bool) -> Fault:
        if not self.cards:
            self.cards = [one for one in FAULTS if can_cut or one.needs != "hosts"]
            self.chance.shuffle(self.cards)
        return self.cards.pop()


def soak(minutes: float, seed: int, out: TextIO, logs: Path | None, backends: list[str], bar: Steps) -> int:
    """Returns how many faults were injected. `bar` is told of the seconds that went by."""
    chance, began = random.Random(seed), time.monotonic()
    told_at = began
    end, numbers = began + minutes * 60, itertools.count(1)
    turn_s = min(ROUND_S, minutes * 60 / max(1, len(backends)))
    without = namespaces_missing()
    header: dict[str, Any] = {"seed": seed, "minutes": minutes, "backends": backends, "without_namespaces": without}
    write(out, FIRST | header | {"layout": episode.layout_line()})
    decks = {name: Deck(random.Random(f"{seed}/{name}")) for name in backends}
    injected = 0
    for number, (way, name) in enumerate(itertools.cycle(itertools.product(WAYS, backends))):
        if time.monotonic() >= end:
            return injected
        # Digests, because frames are damaged too: without them, whoever rewrites frames decides what is pulled.
        plan = Plan(TRANSPORTS[name], way, num_readers=2, middleman=True, settings={"verify_digests": True})
        with contextlib.ExitStack() as stack:
            hosts = loopback(plan.hosts) if without else namespaces(stack, plan.hosts)
            cluster = stack.enter_context(running(plan, hosts, logs))
            scene = episode.Scene(Load(cluster, chance, f"c{number}r"), chance, began)
            scene.open()
            until = min(end, time.monotonic() + turn_s)
            while time.monotonic() < until:
                fault = decks[name].draw(hosts.can_cut)
                line = scene.run(fault, next(numbers))
                write(out, line | {"cluster": number})
                injected += 1
                bar.step(time.monotonic() - told_at)
                told_at = time.monotonic()
                print(f"{line['at_s']:8.1f} s  {name:12} {way:6} {fault.name}: {line['recovery_s']} s", file=sys.stderr)
        ended = {
            "backend": plan.transport.backend,
            "exit_codes": cluster.exit_codes,
            "segments": cluster.left_segments(),
        }
        write(out, {"line": "end", "cluster": number} | ended)
    return injected


def write(out: TextIO, line: dict[str, Any]) -> None:
    out.write(json.dumps(line, separators=(",", ":")) + "\n")
    out.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="Random faults on running clusters, one line of JSON for each.")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("soak.jsonl"))
    parser.add_argument("--logs", type=Path, help="folder for what the processes write to standard error")
    parser.add_argument("--backends", default=",".join(BACKENDS), help=f"of {', '.join(TRANSPORTS)}")
    told = parser.parse_args()
    backends = [name for name in told.backends.split(",") if not report_missing(name)]
    if told.logs:
        told.logs.mkdir(parents=True, exist_ok=True)
    with (
        told.out.open("w", encoding="utf-8") as out,
        progress("seconds of faults", told.minutes * 60, draws_itself=True) as bar,
    ):
        injected = soak(told.minutes, told.seed, out, told.logs, backends, bar)
    print(f"{injected} faults, written to {told.out}", file=sys.stderr)


def report_missing(name: str) -> str:
    missing = TRANSPORTS[name].missing()
    if missing:
        print(f"without {name}: {missing}", file=sys.stderr)
    return missing


if __name__ == "__main__":
    main()
