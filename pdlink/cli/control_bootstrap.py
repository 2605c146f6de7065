"""Owns the bootstrap service of `pdlink bench control`, as a process that ends when its standard input does."""

from __future__ import annotations

import sys

from pdlink.address import Address
from pdlink.bootstrap.server import BootstrapServer
from pdlink.config import load_settings
from pdlink.testing.parent import Parent


def main() -> None:
    parent, settings = Parent(), load_settings()
    with BootstrapServer.start(Address(settings.bind_host, 0), settings) as server:
        parent.say(str(server.address))
        sys.stdin.read()


if __name__ == "__main__":
    main()
