"""Owns what an image installs beside pdlink itself: a line per requirement of pyproject.toml and of the extras named.

Run it as `python3 docker/requirements.py pyproject.toml reference,nixl-cu12`. It imports nothing that needs installing.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """The lines; `KeyError` for an extra that the project does not have."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    found = list(project["dependencies"])
    for name in extras:
        found += project["optional-dependencies"][name]
    return found


if __name__ == "__main__":
    for line in requirements(Path(sys.argv[1]), [one for one in sys.argv[2].split(",") if one]):
        print(line)
