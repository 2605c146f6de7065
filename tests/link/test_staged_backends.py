"""The staged way over real transports: the same slots, frames and bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends.needs import needs_mooncake

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("backend", ["nixl", pytest.param("mooncake", marks=needs_mooncake)])
def test_pages_that_are_packed_arrive_over_a_real_transport(backend: str) -> None:
    """Also where the owner was not told to pack, and packs because it may be asked to."""
    command = [sys.executable, "-m", "tests.link.staged_over", backend]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 0, done.stderr
    taken = json.loads(done.stdout.splitlines()[-1])
    assert taken["staged"] == ["staged"]
    assert taken["direct"] == ["direct"]
    assert taken["auto"] in (["direct"], ["staged"], ["direct", "staged"])
