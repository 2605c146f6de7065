"""Owns the process of one sidecar in the demo: it serves the ranks of one side until it is told to end."""

from __future__ import annotations

import sys

from pdlink.config import load_settings
from pdlink.sidecar.server import SidecarServer
from pdlink_engines.reference.demo.child import ParentPipe, run_child


def main(pipe: ParentPipe, side: str) -> None:
    with SidecarServer.start(pipe.spec.socket(side), load_settings(backends=pipe.spec.backend)):
        pipe.report("beside", side=side)
        pipe.wait_for("end")


if __name__ == "__main__":
    run_child(lambda pipe: main(pipe, sys.argv[1]))
