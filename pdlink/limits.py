"""Owns how many files this process may open, has open, and needs for its peers. It reads limits; `raise_soft_limit`
alone changes one, and commands alone call that: a library that alters its host's limits would surprise it.
"""

from __future__ import annotations

import os
import resource

FILES_PER_LINK = 2
"""What a decode process has open for one prefill rank: the wake-up descriptor of its socket, and the connection."""
SPARE_FILES = 256
"""Kept for everything else: logs, the bootstrap's channels, segments, what the engine opens meanwhile."""


def num_open() -> int:
    """Files that are open now."""
    return len(os.listdir("/proc/self/fd")) - 1  # the listing itself is one


def soft_limit() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def peers_within(limit: int, num_used: int, files_per_peer: int) -> int:
    """How many peers fit into `limit` open files beside `num_used` others; at least 1."""
    return max(1, (limit - num_used - SPARE_FILES) // files_per_peer)


def files_for(num_peers: int, num_used: int, files_per_peer: int) -> int:
    """The limit of open files that `num_peers` need beside `num_used` others."""
    return num_peers * files_per_peer + num_used + SPARE_FILES


def raise_soft_limit() -> int:
    """Let this process open as many files as its hard limit allows; returns how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft_limit()
