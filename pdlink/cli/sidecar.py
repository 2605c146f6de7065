"""Owns `pdlink sidecar`: the link beside an engine, as a process. What it serves is `pdlink.sidecar`'s."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdlink.cli.settings import ConfigOption, SetOption, load
from pdlink.errors import ConfigError

CHECK_INTERVAL_S = 1.0


def sidecar(
    socket: Annotated[
        str | None, typer.Option(help="Unix socket to listen at, in a folder that only this user can change.")
    ] = None,
    backends: Annotated[str | None, typer.Option(help="Transports to offer, best first, or auto.")] = None,
    bind_host: Annotated[str | None, typer.Option(help="Address that control sockets bind.")] = None,
    advertise_host: Annotated[
        str | None, typer.Option(help="Host that peers are told; needed where every interface is bound.")
    ] = None,
    token_file: Annotated[str | None, typer.Option(help="File of the token that the bootstrap demands.")] = None,
    http_bind: Annotated[
        str | None, typer.Option(help="Host and port of /healthz, /readyz and /metrics; none without it.")
    ] = None,
    config: ConfigOption = None,
    assigned: SetOption = None,
) -> None:
    """Serve the engines of this node, a process for each, until Ctrl-C or SIGTERM.

    An engine opens `pdlink.sidecar.connect(SOCKET)` where it would open a `Node`. Pools lie in memory of the host or of
    a GPU that the engine allocates with `pdlink.memory.allocate`. Options go before PDLINK_* variables, and those
    before the file of --config.
    """
    import threading

    from pdlink.sidecar.server import SidecarServer

    settings = load(
        config,
        assigned,
        sidecar_socket=socket,
        backends=backends,
        bind_host=bind_host,
        advertise_host=advertise_host,
        token_file=token_file,
        http_bind=http_bind,
    )
    if settings.sidecar_socket is None:
        raise ConfigError("name the socket to listen at: --socket /run/user/1000/pdlink.sock, or PDLINK_SIDECAR_SOCKET")
    with SidecarServer.start(Path(settings.sidecar_socket), settings) as server:
        over = threading.Event()
        try:
            print(f"pdlink sidecar listens at {server.path}", flush=True)
            if server.http_address:
                print(f"health and metrics at http://{server.http_address}", flush=True)
            while not over.wait(CHECK_INTERVAL_S):
                pass
        except KeyboardInterrupt:  # SIGTERM too: being stopped is how a service ends
            print("sidecar stops", flush=True)
