"""Owns how tests run a case of `backend_cases`: over which transports and ways, and in a process of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import processes
from tests.link.transports import TRANSPORTS

ROOT = Path(__file__).parents[2]
LIMIT_S = 240
TEST_LIMIT_S = LIMIT_S + 10
"""For a test of one case, whose own limit is the one that is to speak."""


def over(*, quick: tuple[str, ...]):
    """Parametrises over transports and ways. `quick` of the ways run in every run, the others are slow."""
    params = [
        pytest.param(
            name,
            way,
            id=f"{name}-{way}",
            marks=[pytest.mark.backend(name), *([] if way in quick else [pytest.mark.slow])],
        )
        for name in TRANSPORTS
        for way in ("direct", "staged")
    ]
    return pytest.mark.parametrize(("transport", "way"), params)


def over_each(values: Sequence[str], num_each: int = 1):
    """Parametrises over transports, ways and `values`. All of them are slow; `num_each` of the values, other ones from
    pair to pair, are enough for CI, and the rest is thorough."""
    params = []
    for number, (name, way) in enumerate((name, way) for name in TRANSPORTS for way in ("direct", "staged")):
        # An even number of values would give each of them to one of the ways alone.
        first = number if len(values) % 2 else number + number // 2
        chosen = {(first + step * len(values) // num_each) % len(values) for step in range(num_each)}
        for place, value in enumerate(values):
            marks = [pytest.mark.backend(name), pytest.mark.slow]
            marks += [] if place in chosen else [pytest.mark.thorough]
            params.append(pytest.param(name, way, value, id=f"{name}-{way}-{value}", marks=marks))
    return params


def run_case(case: str, transport: str, way: str, limit_s: float = LIMIT_S, **options: object) -> None:
    """Run it in a process of its own and insist on a good end of that."""
    if reason := TRANSPORTS[transport].missing():
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.link.backend_cases", case, transport, way, json.dumps(options)]
    env = {**os.environ, **TRANSPORTS[transport].env}
    done = processes.run(command, cwd=ROOT, env=env, timeout_s=limit_s)
    assert done.returncode == 0, done.stderr[-6000:]
