"""Random pairs over one backend, in a process of its own: transport libraries stay loaded until it ends.

Run by `test_over_backends` with the backend's name and how many pairs; prints how many were moved by each way.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator

from hypothesis import HealthCheck, given, settings

from pdlink.backends.base import Backend
from pdlink.backends.registry import open_backends
from pdlink.config import load_settings
from tests.topology.site import run
from tests.topology.strategies import Case, cases

MOST_RANKS = 4
"""Each reader makes a link of its own to each rank, which takes a transport long."""


class Kept:
    """A backend that outlives the sites that use it, as starting one takes long."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def close(self) -> None:
        """Not yet."""


def main(backend: str, num_pairs: int) -> None:
    logging.disable(logging.WARNING)
    opened = [open_backends(backend, load_settings({}, backends=backend))[backend] for _ in range(2)]
    turns: Iterator[Kept] = iter(())
    moved: Counter[str] = Counter()

    def next_backend() -> Backend:
        nonlocal turns
        kept = next(turns, None)
        if kept is None:
            turns = iter([Kept(one) for one in opened])
            kept = next(turns)
        return kept  # type: ignore[return-value]

    make: Callable[[], Backend] = next_backend

    @settings(
        max_examples=num_pairs, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(cases(ways=["direct", "staged"], most_ranks=MOST_RANKS))
    def move(case: Case) -> None:
        run(case, make)
        moved[case.way] += 1

    try:
        move()
    finally:
        for one in opened:
            one.close()
    print(json.dumps(moved))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
