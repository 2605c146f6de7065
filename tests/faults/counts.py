"""Owns the counting of what the processes of a cluster hold, once that has come to rest. It judges nothing."""

from __future__ import annotations

import time
from typing import Any

from tests.faults.cluster import Cluster

LOOKS = 4
"""That many in a row must be the same."""
LOOK_GAP_S = 0.15
"""All looks together take longer than a call to a bootstrap, which opens files for a moment."""
PATIENCE_S = 30.0

Census = dict[str, dict[str, Any]]


def look(cluster: Cluster) -> Census:
    """Process -> its pid and what it holds right now, of those that can say so."""
    found = {}
    for name in (*cluster.plan.ranks, *cluster.plan.readers):
        if answer := cluster.ask(name, do="census"):
            found[name] = {"pid": cluster.processes[name].child.pid, "census": answer["census"]}
    return found


def at_rest(cluster: Cluster) -> Census:
    """The first look that `LOOKS - 1` later ones agree with, process by process; after `PATIENCE_S` the last one."""
    give_up = time.monotonic() + PATIENCE_S
    found, agreed = look(cluster), dict.fromkeys(cluster.processes, 1)
    while time.monotonic() < give_up and any(agreed[name] < LOOKS for name in found):
        cluster.wait_a_moment(LOOK_GAP_S)
        again = look(cluster)
        agreed = {name: agreed[name] + 1 if found.get(name) == one else 1 for name, one in again.items()}
        found = again
    return found
