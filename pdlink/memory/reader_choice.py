"""Owns the choice of the reader that brings layers of other ranks, and the reasons for it. It opens none.

Every rank of a shard group decides by itself from the same facts, so that all decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pdlink.errors import BackendUnavailable
from pdlink.layout.regions import MemoryKind

TYPICAL_TOKENS = 32768


class ReaderKind(StrEnum):
    BROADCAST = "broadcast"
    PEER = "peer"


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """What one layer read costs: milliseconds that it takes whatever is live, and gigabytes a second beyond.

    Read off measurements on two H200 over NVLink, 788 B a token, 8,192 to 262,144 live tokens (`cli/bench_pool.md`):
    0.08 to 0.85 ms by broadcast, 0.03 to 0.58 ms by gathers.
    """

    broadcast_ms: float = 0.06
    broadcast_gb_s: float = 260.0
    peer_ms: float = 0.011
    peer_gb_s: float = 365.0


MEASURED = LinkCosts()


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What one rank of the group says of itself.

    `host` is equal on ranks that see one /dev/shm. `can_order` says whether its machine keeps the order of stores that
    host boards need (device pools need none). `reaches` are the ranks whose memory it can map.
    """

    host: str
    can_order: bool = True
    reaches: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ReaderChoice:
    """The chosen reader; `reason` says why, and why not the other."""

    kind: ReaderKind
    reason: str


def choose_reader(
    memory: MemoryKind,
    ranks: Sequence[RankFacts],
    layer_token_bytes: int,
    *,
    wanted: ReaderKind | None = None,
    live_tokens: int = TYPICAL_TOKENS,
    costs: LinkCosts = MEASURED,
) -> ReaderChoice:
    """Which reader a pool on `memory` uses. `layer_token_bytes` is what a token takes in one layer, all components.

    `wanted` forces one. Raises `BackendUnavailable` where it cannot work, naming the rank and the reason.
    """
    obstacle = peer_obstacle(memory, ranks)
    if wanted is ReaderKind.PEER and obstacle:
        raise BackendUnavailable(f"reader peer is asked for, and {obstacle}; set pool_reader to auto or broadcast")
    if wanted is not None:
        return ReaderChoice(wanted, f"{wanted.value} is asked for")
    if obstacle:
        return ReaderChoice(ReaderKind.BROADCAST, f"broadcast, because {obstacle}")
    if memory is MemoryKind.HOST:
        return ReaderChoice(ReaderKind.PEER, "peer, because all ranks share one host: one copy, and no rank waits")
    peer, broadcast = estimate_ms(len(ranks), layer_token_bytes * live_tokens, costs)
    figures = (
        f"a layer read of {live_tokens} tokens of {layer_token_bytes} B on {len(ranks)} ranks is estimated at "
        f"{peer:.3f} ms by peer gathers and {broadcast:.3f} ms by broadcast"
    )
    kind = ReaderKind.PEER if peer <= broadcast else ReaderKind.BROADCAST
    return ReaderChoice(kind, f"{kind.value}, because {figures}")


def peer_obstacle(memory: MemoryKind, ranks: Sequence[RankFacts]) -> str:
    """Why gathers from each other's memory cannot work in this group; empty if they can."""
    for rank, one in enumerate(ranks):
        if one.host != ranks[0].host:
            return f"shard rank {rank} is on another host (or has another /dev/shm) than shard rank 0"
        if memory is MemoryKind.HOST and not one.can_order:
            return f"the machine of shard rank {rank} is no x86-64, whose order of stores host boards need"
        if memory is MemoryKind.CUDA:
            missing = sorted(set(range(len(ranks))) - one.reaches - {rank})
            if missing:
                return f"the device of shard rank {rank} cannot map memory of shard rank {missing[0]}'s"
    return ""


def estimate_ms(num_ranks: int, nbytes: int, costs: LinkCosts = MEASURED) -> tuple[float, float]:
    """(peer, broadcast) milliseconds of one read of `nbytes` that all other ranks make at once.

    Gathers of several ranks share what the owner's link sends; a broadcast passes the bytes on.
    """
    peer = costs.peer_ms + nbytes * max(1, num_ranks - 1) / costs.peer_gb_s / 1e6
    return peer, costs.broadcast_ms + nbytes / costs.broadcast_gb_s / 1e6
