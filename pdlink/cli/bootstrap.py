"""Owns `pdlink bootstrap`: the directory service as a process. What it serves is `pdlink.bootstrap`'s."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from pdlink.cli.settings import ConfigOption, SetOption, load
from pdlink.errors import PdlinkError

DEFAULT_BIND = "127.0.0.1:7400"
CHECK_INTERVAL_S = 1.0


def bootstrap(
    bind: Annotated[str, typer.Option(help="Host and port to listen at; port 0 takes a free one.")] = DEFAULT_BIND,
    advertise_host: Annotated[
        str | None, typer.Option(help="Host that peers are told; needed where every interface is bound.")
    ] = None,
    tls_certificate: Annotated[str | None, typer.Option(help="PEM file to serve TLS with.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="PEM file of its private key.")] = None,
    tls_ca: Annotated[str | None, typer.Option(help="PEM file of the CA of the callers' certificates.")] = None,
    tls_client_auth: Annotated[
        str | None, typer.Option(help="`require`: demand certificates of the callers (mTLS).")
    ] = None,
    token_file: Annotated[str | None, typer.Option(help="File of the token that callers must send.")] = None,
    http_bind: Annotated[
        str | None, typer.Option(help="Host and port of /healthz, /readyz and /metrics; none without it.")
    ] = None,
    config: ConfigOption = None,
    assigned: SetOption = None,
) -> None:
    """Serve the directory that prefill ranks register with, until Ctrl-C or SIGTERM.

    Options go before PDLINK_* variables, and those before the file of --config. A token is no option: every user of a
    machine can read those.
    """
    from pdlink.address import parse_address
    from pdlink.bootstrap.server import BootstrapServer
    from pdlink.events import Events

    address = parse_address(bind)
    settings = load(
        config,
        assigned,
        advertise_host=advertise_host,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        tls_ca=tls_ca,
        tls_client_auth=tls_client_auth,
        token_file=token_file,
        http_bind=http_bind,
    )
    events = Events()
    with BootstrapServer.start(address, settings, events=events) as server, contextlib.ExitStack() as stack:
        watch = None
        if settings.http_bind:
            from pdlink.observability.bootstrap_watch import BootstrapWatch

            watch = BootstrapWatch(server, events).serve(settings.http_bind)
            stack.callback(watch.close)
        try:
            print(f"bootstrap serves at {server.address}", flush=True)
            if watch:
                print(f"health and metrics at http://{watch.address}", flush=True)
            while not server.wait(CHECK_INTERVAL_S):
                pass
        except KeyboardInterrupt:  # SIGTERM too: being stopped is how a service ends
            print("bootstrap stops", flush=True)
            return
    raise PdlinkError(f"the bootstrap service at {server.address} died; see the log above")
