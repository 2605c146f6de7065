"""Random pairs over real transports: the same pages, parts and bytes."""

from __future__ import annotations

import json
import os
import sys

import pytest

from tests import processes
from tests.link.ranks import ROOT
from tests.link.transports import TRANSPORTS


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "transport", [pytest.param(name, marks=pytest.mark.backend(name)) for name in ("nixl-cma", "mooncake-tcp")]
)
@pytest.mark.parametrize("num_pairs", [25, pytest.param(100, marks=pytest.mark.thorough)])
def test_any_pair_moves_every_byte_over_a_real_transport(transport: str, num_pairs: int) -> None:
    over = TRANSPORTS[transport]
    if reason := over.missing():
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.topology.over", over.backend, str(num_pairs)]
    done = processes.run(command, cwd=ROOT, env={**os.environ, **over.env}, timeout_s=1000.0)
    assert done.returncode == 0, done.stderr
    moved = json.loads(done.stdout.splitlines()[-1])
    assert sum(moved.values()) >= num_pairs
    assert min(moved["direct"], moved["staged"]) >= num_pairs // 5
