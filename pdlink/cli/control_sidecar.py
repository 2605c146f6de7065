"""Owns the sidecar of `pdlink bench control`, as a process that ends when its standard input does."""

from __future__ import annotations

import sys
from pathlib import Path

from pdlink.config import load_settings
from pdlink.sidecar.server import SidecarServer
from pdlink.testing.parent import Parent


def main() -> None:
    parent = Parent()
    with SidecarServer.start(Path(sys.argv[1]), load_settings()):
        parent.say("ready")
        sys.stdin.read()


if __name__ == "__main__":
    main()
