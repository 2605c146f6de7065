"""Owns one fault from beginning to end, and the line that tells of it. It decides nothing: `table` judges the line."""

from __future__ import annotations

import random
import time
from typing import Any

from tests.faults import counts, whole
from tests.faults.cluster import Death
from tests.faults.counts import Census
from tests.faults.kinds import At, Fault
from tests.faults.load import Load, Request
from tests.faults.shape import LEAK_DEADLINE_S, RECOVERY_DEADLINE_S, VERDICT_DEADLINE_S, make_layout
from tests.faults.table import Marks
from tests.link.transports import TRANSPORTS

NUM_MET = 2
MET_GAP_S = 0.25
QUIET_S = 0.3
"""How long pages of ended requests are watched before they are handed out."""
NUM_PROBES = 5
"""Requests of each reader that what seems to have leaked must outlast, at the least."""


def layout_line() -> dict[str, Any]:
    """What of the layout the judge must know."""
    return {one.name: {"page_bytes": one.page_bytes, "layers": list(one.layers)} for one in make_layout().components}


def warm_up(load: Load) -> None:
    """Every reader has pulled from every rank, so that all that stays open is open."""
    for _ in range(3):
        begun = [load.begin(reader, gap_s=gap_s) for reader in load.cluster.plan.readers for gap_s in (0.0, 0.02)]
        assert load.drain(RECOVERY_DEADLINE_S), "requests do not end though nothing is wrong"
    assert all(one.state == "done" for one in begun), [one.said.get("why") for one in begun]
    load.settle()


class Scene:
    """A cluster that is damaged again and again, and what its processes held at rest before.

    Every process has one `Marks` to be held against; `leak_deadline_s` is how long it may hold more than ever.
    """

    def __init__(
        self,
        load: Load,
        chance: random.Random,
        began: float | None = None,
        *,
        leak_deadline_s: float = LEAK_DEADLINE_S,
    ) -> None:
        """`began` is where the clock of its lines starts: now, unless something else is said."""
        self.load, self.cluster, self.chance = load, load.cluster, chance
        self.leak_deadline_s = leak_deadline_s
        self.began = time.monotonic() if began is None else began
        plan = self.cluster.plan
        self.transport = next(name for name, one in TRANSPORTS.items() if one == plan.transport)
        self.marks = Marks(self.transport, (*plan.ranks, *plan.readers))
        self.held: Census = {}
        self.touched = ""
        """What was touched outside of any request while things were counted, in words."""

    def open(self) -> None:
        """Warm up, and count for the first time. Raises `AssertionError` where the cluster does not work."""
        warm_up(self.load)
        if lacking := whole.make_whole(self.load):
            raise AssertionError(f"the cluster is not whole though nothing was done to it: {lacking}")
        self.note(self.count())

    def run(self, fault: Fault, number: int) -> dict[str, Any]:
        """Damage the cluster while requests run, repair it, and see it recover until it is whole; the line of that."""
        load, cluster, chance, before = self.load, self.cluster, self.chance, self.held
        whole.probe(load)
        since_last = load.forget()
        at = At(cluster, chance)
        for _ in range(NUM_MET):  # slow enough to be met in the middle, wherever that is
            load.begin(chance.choice(cluster.plan.readers), num_pages=chance.randint(4, 12), gap_s=MET_GAP_S)
        load.run(chance.uniform(0, MET_GAP_S))
        load.keep()
        injected = time.monotonic()
        fault.inject(at)
        held_s = chance.uniform(*fault.hold_s)
        load.run(held_s)
        fault.repair(at)
        revived = cluster.revive()
        repaired = time.monotonic()

        recovered = _recover(load, repaired)
        ended = load.drain(max(0.0, injected + VERDICT_DEADLINE_S - time.monotonic()) + QUIET_S)
        load.run_nothing(QUIET_S)
        touched = load.settle()
        lacking = whole.make_whole(load) if ended else "requests have no end"
        after = self.count() if ended else counts.at_rest(cluster)
        self.note(after)
        touched += self.touched + load.settle()
        self.touched = ""
        requests = [one.row(injected) for one in load.requests.values()]
        if ended:
            load.forget()
        else:
            load.requests.clear()
        return {
            "line": "fault",
            "number": number,
            "fault": fault.name,
            "whom": at.victims,
            "backend": cluster.plan.transport.backend,
            "transport": self.transport,
            "way": cluster.plan.way,
            "at_s": round(injected - self.began, 3),
            "held_s": round(held_s, 3),
            "revived": revived,
            "died": [_death_line(one, injected) for one in self._deaths()],
            "requests": requests,
            "since_last": since_last,
            "recovery_s": round(recovered.ended - repaired, 3) if recovered else None,
            "recovered_by": recovered.name if recovered else None,
            "lacking": lacking,
            "whole_s": round(time.monotonic() - repaired, 3),
            "touched": touched,
            "deadlines": {"verdict_s": VERDICT_DEADLINE_S, "recovery_s": RECOVERY_DEADLINE_S},
            "processes": {
                name: {
                    "pid_before": before.get(name, {}).get("pid"),
                    "before": before.get(name, {}).get("census"),
                    "pid_after": after.get(name, {}).get("pid"),
                    "after": after.get(name, {}).get("census"),
                }
                for name in (*cluster.plan.ranks, *cluster.plan.readers)
            },
        }

    def count(self) -> Census:
        """What everybody holds at rest. Where that is more than ever it is counted again after further requests, and
        where somebody died of it, once the cluster is whole again."""
        give_up, num_probes = time.monotonic() + self.leak_deadline_s, 0
        everybody = {*self.cluster.plan.ranks, *self.cluster.plan.readers}
        while True:
            found = counts.at_rest(self.cluster)
            is_late = time.monotonic() > give_up and num_probes >= NUM_PROBES
            if is_late or (found.keys() == everybody and not self.kept_more(found)):
                return found
            if found.keys() == everybody:
                whole.probe(self.load)
            else:
                whole.make_whole(self.load)
            num_probes += 1
            # A probe may have met a rank that was just dying: its pages are kept until they were looked at.
            self.load.run_nothing(QUIET_S)
            self.touched += self.load.settle()

    def note(self, found: Census) -> None:
        """From now on that is what processes may hold."""
        self.held = found
        for name, one in found.items():
            self.marks.add(name, one["pid"], one["census"])

    def kept_more(self, found: Census) -> list[str]:
        """What processes hold that they never held before, in words."""
        return [
            f"{name}: {text}"
            for name, one in found.items()
            for text in self.marks.grown(name, one["pid"], one["census"])
        ]

    def _deaths(self) -> list[Death]:
        deaths = list(self.cluster.unexpected)
        self.cluster.unexpected.clear()
        return deaths


def _death_line(one: Death, injected: float) -> dict[str, Any]:
    return {"name": one.name, "code": one.code, "after_s": round(one.at - injected, 3)}


def _recover(load: Load, repaired: float) -> Request | None:
    """The first request that began after the repair and succeeded, if any did in time. Whoever died is replaced."""
    give_up = repaired + RECOVERY_DEADLINE_S
    while time.monotonic() < give_up:
        load.step()
        done = [one for one in load.requests.values() if one.begun >= repaired and one.state == "done"]
        if done:
            return min(done, key=lambda one: one.ended)
        load.cluster.revive()
    return None
