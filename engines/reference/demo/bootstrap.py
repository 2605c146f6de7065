"""Owns the bootstrap process of the demo: it serves until the demo closes its pipe."""

from __future__ import annotations

from pdlink.address import parse_address
from pdlink.bootstrap.server import BootstrapServer
from pdlink.config import load_settings
from pdlink_engines.reference.demo.child import ParentPipe, run_child


def main(pipe: ParentPipe) -> None:
    with BootstrapServer.start(parse_address(pipe.spec.bootstrap), load_settings()) as server:
        pipe.report("serving", address=str(server.address))
        pipe.wait_for("end")


if __name__ == "__main__":
    run_child(main)
