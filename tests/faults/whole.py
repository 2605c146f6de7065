"""Owns the proof that a cluster is whole, and what it takes until it is.

Nobody is dead, every bootstrap knows every rank of now, no connection waits for an answer, and every reader has pulled
from every rank. The next damage begins from there, so that what comes of the one before it is not taken for its own.
"""

from __future__ import annotations

import time

from tests.faults.load import Load, Request
from tests.faults.shape import WHOLE_DEADLINE_S

PAUSE_S = 1.0
"""Pages of a failed probe are watched: so many probes must not take all."""


def make_whole(load: Load) -> str:
    """Restart who has died, and probe until the cluster is whole; what it lacks when the time is up, if anything."""
    give_up = time.monotonic() + WHOLE_DEADLINE_S
    while True:
        load.cluster.revive()
        lacking = _lacking(load)
        if not lacking or time.monotonic() > give_up:
            return lacking
        load.cluster.wait_a_moment()


def probe(load: Load) -> list[Request]:
    """One request of every reader through every rank, to its end; those that did not succeed."""
    begun = [load.begin(reader, num_pages=1, gap_s=0.0) for reader in load.cluster.plan.readers]
    load.drain()
    return [one for one in begun if one.state != "done" or set(one.senders.values()) != {"released"}]


def _lacking(load: Load) -> str:
    cluster = load.cluster
    ranks = [cluster.processes[rank].ready or {} for rank in cluster.plan.ranks]
    now = {one.get("worker_id"): one.get("incarnation") for one in ranks}
    for reader in cluster.plan.readers:
        for address, known in ((cluster.ask(reader, do="known") or {}).get("known") or {"?": None}).items():
            if known != now:
                return f"{reader} hears from the bootstrap at {address} of {known}, and the ranks are {now}"
    if waiting := cluster.hosts.waiting():
        return f"connections wait for an answer: {waiting}"
    if failed := probe(load):
        cluster.wait_a_moment(PAUSE_S)
        return f"probes fail: {[(one.name, one.state, one.said.get('why'), one.senders) for one in failed]}"
    for reader in cluster.plan.readers:
        if not (cluster.ask(reader, do="follows") or {}).get("follows"):
            return f"{reader} follows no bootstrap"
    dead = [name for name in cluster.plan.names if cluster.processes[name].has_ended]
    return f"{', '.join(dead)} died" if dead else ""
