"""The staged way over real transports: the same slots, frames and bytes."""

from __future__ import annotations

import json
import os
import sys

import pytest

from tests import processes
from tests.link.ranks import ROOT
from tests.link.transports import TRANSPORTS

QUICK = ("nixl-cma", "mooncake-tcp")
PARAMS = [
    pytest.param(name, marks=[pytest.mark.backend(name), *([] if name in QUICK else [pytest.mark.slow])])
    for name in TRANSPORTS
    if name != "ipc"  # which reads pages in place unless it is forced, as everywhere in test_staged_moving
]


@pytest.mark.parametrize("transport", PARAMS)
def test_pages_that_are_packed_arrive_over_a_real_transport(transport: str) -> None:
    """Also where the owner was not told to pack, and packs because it may be asked to."""
    over = TRANSPORTS[transport]
    if reason := over.missing():
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.link.staged_over", over.backend]
    env = {**os.environ, **over.env}
    done = processes.run(command, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    taken = json.loads(done.stdout.splitlines()[-1])
    assert taken["staged"] == ["staged"]
    assert taken["direct"] == ["direct"]
    assert set(taken["auto"]) <= {"direct", "staged"}
