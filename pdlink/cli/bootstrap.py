"""Owns `pdlink bootstrap`: the directory service as a process. What it serves is `pdlink.bootstrap`'s."""

from __future__ import annotations

from typing import Annotated

import typer

from pdlink.errors import PdlinkError

DEFAULT_BIND = "127.0.0.1:7400"
CHECK_INTERVAL_S = 1.0


def bootstrap(
    bind: Annotated[str, typer.Option(help="Host and port to listen at; port 0 takes a free one.")] = DEFAULT_BIND,
    advertise_host: Annotated[
        str | None, typer.Option(help="Host that peers are told; needed where every interface is bound.")
    ] = None,
) -> None:
    """Serve the directory that prefill ranks register with, until Ctrl-C or SIGTERM."""
    from pdlink.address import parse_address
    from pdlink.bootstrap.server import BootstrapServer
    from pdlink.config import load_settings

    address = parse_address(bind)
    settings = load_settings(advertise_host=advertise_host)
    with BootstrapServer.start(address, settings) as server:
        print(f"bootstrap serves at {server.address}", flush=True)
        try:
            while not server.wait(CHECK_INTERVAL_S):
                pass
        except KeyboardInterrupt:  # SIGTERM too: being stopped is how a service ends
            print("bootstrap stops", flush=True)
            return
    raise PdlinkError(f"the bootstrap service at {server.address} died; see the log above")
