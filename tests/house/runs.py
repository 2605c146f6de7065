"""Owns pytest runs inside tests: one sample file under the conftest of this repository, in a process of its own."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from tests import processes
from tests.house.tree import REPO

# Each answers for shared memory of its own: what the tests beside it make and leave for a moment is not its fault.
INI = """[pytest]
wind_down_s = 0.3
segments = SEGMENTS
markers =
    gpu
    backend
"""


def segment_of(folder: Path) -> str:
    """The name of a segment that the run in `folder` answers for."""
    return f"pdlink-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"


def run_pytest(folder: Path, source: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_sample.py").write_text(source)
    (folder / "conftest.py").write_bytes((REPO / "tests" / "conftest.py").read_bytes())
    (folder / "pytest.ini").write_text(INI.replace("SEGMENTS", segment_of(folder)))
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    env |= {"CI": "", "PYTHONPATH": str(REPO)} | environment
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    return processes.run(command, cwd=folder, env=env)
