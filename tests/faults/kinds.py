"""Owns the faults: what each does to which process, link or frame, and how it is undone. It judges nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.faults.cluster import Cluster, host_of

SHORT_S, LONG_S = (0.3, 0.8), (2.5, 4.0)
"""Shorter than liveness, so that it may go unnoticed; longer, so that it may not."""
SLOW_MBIT = 40
RATE = 0.2
"""Of frames that are repeated, reordered or damaged."""
STRANGE_FRAMES = 60


@dataclass
class At:
    """Where one fault strikes."""

    cluster: Cluster
    chance: random.Random
    victims: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fault:
    """`inject` names the victims; `repair` undoes what does not undo itself, dead processes aside: they are revived."""

    name: str
    inject: Callable[[At], None]
    repair: Callable[[At], None] = lambda at: None
    hold_s: tuple[float, float] = SHORT_S
    needs: str = ""
    """ "hosts", "middleman" or "bootstraps" (two of them); empty where any cluster will do."""

    def fits(self, cluster: Cluster) -> bool:
        return {
            "": True,
            "hosts": cluster.hosts.can_cut,
            "middleman": cluster.plan.middleman,
            "bootstraps": cluster.plan.num_bootstraps > 1,
        }[self.needs]


def names(at: At, whom: str) -> list[str]:
    plan = at.cluster.plan
    if whom == "all bootstraps":
        return plan.bootstraps
    one_of = {"prefill": plan.ranks, "decode": plan.readers, "one bootstrap": plan.bootstraps}[whom]
    return [at.chance.choice(one_of)]


def each(do: Callable[[Cluster, str], None], whom: str) -> Callable[[At], None]:
    """Do it to victims of a kind."""

    def inject(at: At) -> None:
        at.victims = names(at, whom)
        for name in at.victims:
            do(at.cluster, name)

    return inject


def resume(at: At) -> None:
    for name in at.victims:
        at.cluster.resume(name)


def kill_stopped(at: At) -> None:
    for name in at.victims:
        at.cluster.kill(name)


def heal(at: At) -> None:
    at.cluster.hosts.heal()


def cut_off(cluster: Cluster, name: str, *, deaf: bool, mute: bool) -> None:
    """Between the victim's host and those of every other role. Hosts of one role stay joined."""
    here = host_of(name)
    for other in cluster.plan.hosts:
        if other == here or (here.startswith("bootstrap") and other.startswith("bootstrap")):
            continue
        # Prefill and decode lose each other only: what becomes of bootstraps has faults of its own.
        if not here.startswith("bootstrap") and other.startswith("bootstrap"):
            continue
        if deaf:
            cluster.hosts.cut(here, other)
        if mute:
            cluster.hosts.cut(other, here)


def cut(cluster: Cluster, name: str) -> None:
    cut_off(cluster, name, deaf=True, mute=True)


def deafen(cluster: Cluster, name: str) -> None:
    cut_off(cluster, name, deaf=True, mute=False)


def mute(cluster: Cluster, name: str) -> None:
    cut_off(cluster, name, deaf=False, mute=True)


def slow(cluster: Cluster, name: str) -> None:
    cluster.hosts.slow(host_of(name), SLOW_MBIT)


def empty(cluster: Cluster, name: str) -> None:
    """It comes back at once, and knows nobody."""
    cluster.kill(name)
    cluster.revive()


def jump(days: int) -> Callable[[Cluster, str], None]:
    return lambda cluster, name: cluster.jump_clock(name, days)


def jump_back(at: At) -> None:
    for name in at.victims:
        if at.cluster.can_answer(name):
            at.cluster.jump_clock(name, -1)


def frames(to: str, **rates: float) -> Callable[[At], None]:
    def inject(at: At) -> None:
        at.victims = [f"frames to {to}"]
        at.cluster.ask("middleman", do="rule", rates={to: rates}, seed=at.chance.randrange(1 << 30))

    return inject


def still(at: At) -> None:
    none = {"repeat": 0.0, "swap": 0.0, "lose": 0.0, "damage": 0.0}
    at.cluster.ask("middleman", do="rule", rates={"prefill": none, "decode": none})


def stranger(at: At) -> None:
    at.victims = list(at.cluster.plan.ranks)
    at.cluster.ask("middleman", do="stranger", seed=at.chance.randrange(1 << 30), frames=STRANGE_FRAMES)


def shout(at: At) -> None:
    at.victims = names(at, "all bootstraps")
    seed, addresses = at.chance.randrange(1 << 30), at.cluster.bootstrap_addresses
    answer = at.cluster.ask("middleman", do="shout", seed=seed, addresses=addresses, calls=STRANGE_FRAMES)
    assert answer is not None
    assert answer["num"].get("refused"), f"no bootstrap refused anything: {answer}"


PEERS = ("prefill", "decode")
BOOTSTRAPS = ("one bootstrap", "all bootstraps")

FAULTS: tuple[Fault, ...] = (
    *(Fault(f"kill {one}", each(Cluster.kill, one)) for one in (*PEERS, *BOOTSTRAPS)),
    *(Fault(f"exit {one}", each(Cluster.exit, one)) for one in (*PEERS, "one bootstrap")),
    *(Fault(f"stop {one}", each(Cluster.stop, one), resume, LONG_S) for one in (*PEERS, *BOOTSTRAPS)),
    *(Fault(f"stop {one} for a moment", each(Cluster.stop, one), resume) for one in PEERS),
    *(Fault(f"stop for good {one}", each(Cluster.stop, one), kill_stopped, LONG_S) for one in PEERS),
    *(Fault(f"empty {one}", each(empty, one)) for one in BOOTSTRAPS),
    *(Fault(f"cut {one}", each(cut, one), heal, LONG_S, "hosts") for one in (*PEERS, *BOOTSTRAPS)),
    *(Fault(f"deafen {one}", each(deafen, one), heal, LONG_S, "hosts") for one in (*PEERS, *BOOTSTRAPS)),
    *(Fault(f"mute {one}", each(mute, one), heal, LONG_S, "hosts") for one in (*PEERS, *BOOTSTRAPS)),
    *(Fault(f"slow link of {one}", each(slow, one), heal, LONG_S, "hosts") for one in PEERS),
    *(Fault(f"clock of {one} ahead", each(jump(1), one), jump_back) for one in (*PEERS, "one bootstrap")),
    *(Fault(f"clock of {one} back", each(jump(-1), one), lambda at: None) for one in (*PEERS, "one bootstrap")),
    *(Fault(f"repeat frames to {one}", frames(one, repeat=RATE), still, SHORT_S, "middleman") for one in PEERS),
    *(Fault(f"reorder frames to {one}", frames(one, swap=RATE), still, SHORT_S, "middleman") for one in PEERS),
    *(Fault(f"lose frames to {one}", frames(one, lose=RATE), still, SHORT_S, "middleman") for one in PEERS),
    *(Fault(f"damage frames to {one}", frames(one, damage=RATE), still, SHORT_S, "middleman") for one in PEERS),
    Fault("stranger to prefill", stranger, needs="middleman"),
    Fault("stranger to bootstrap", shout, needs="middleman"),
)


def fault(name: str) -> Fault:
    (found,) = [one for one in FAULTS if one.name == name]
    return found
