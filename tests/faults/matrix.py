"""Owns which faults strike over which transport, and one cluster that is damaged by some of them, one after the other.

A test of it fails with every complaint of the judge. The faults themselves are in `kinds`.
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from tests.faults import episode, soak, table
from tests.faults.cluster import Plan, running, said
from tests.faults.hosts import loopback, namespaces, namespaces_missing
from tests.faults.kinds import FAULTS, Fault
from tests.faults.load import Load
from tests.link.transports import TRANSPORTS

SEED = 5
HALVES = ("processes", "links")


def damage(transport: str, way: str, faults: list[Fault], logs: Path, *, apart: bool = True, readers: int = 1) -> None:
    """One cluster, one fault after the other; every complaint of all of them is shown at the end.

    With `apart` each role has a network namespace of its own. Frames are compared by digests only where they are
    damaged: everything else must be right without.
    """
    if reason := TRANSPORTS[transport].missing() or (namespaces_missing() if apart else ""):
        pytest.skip(reason)
    plan = Plan(
        TRANSPORTS[transport],
        way,
        num_readers=readers,
        middleman=any(one.needs == "middleman" for one in faults),
        settings={"verify_digests": any("damage" in one.name for one in faults)},
    )
    chance, complaints = random.Random(SEED), []
    with contextlib.ExitStack() as stack:
        out = stack.enter_context((logs / "lines.jsonl").open("w", encoding="utf-8"))
        hosts = namespaces(stack, plan.hosts) if apart else loopback(plan.hosts)
        cluster = stack.enter_context(running(plan, hosts, logs))
        judge, scene = table.Judge(episode.layout_line()), episode.Scene(Load(cluster, chance), chance)
        scene.open()
        for number, one in enumerate(faults):
            assert one.fits(cluster)
            line = scene.run(one, number)
            soak.write(out, line)
            verdict = judge.judge(line)
            complaints += [f"{one.name} of {line['whom']}: {text}" for text in verdict.complaints]
            assert verdict.num_under_way, f"{one.name} met no request"
    complaints += table.judge_end({"exit_codes": cluster.exit_codes, "segments": cluster.left_segments()})
    if complaints:
        pytest.fail("\n".join([*complaints, "the processes said:", said(logs)]), pytrace=False)


def half(transport: str, which: str) -> list[Fault]:
    """The faults over a transport that strike at "processes", or at "links" and frames, in an order that is the same
    each time."""
    between = [one for one in of(transport) if one.needs in ("hosts", "middleman") or one.name.startswith("stranger")]
    return between if which == "links" else [one for one in of(transport) if one not in between]


def of(transport: str) -> list[Fault]:
    """What strikes the directory or a clock alone is done over one transport here, and over each in a soak."""
    if transport == "ipc":
        return list(FAULTS)
    return [one for one in FAULTS if not any(word in one.name for word in ("one bootstrap", "clock", "stranger"))]
