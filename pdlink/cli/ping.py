"""Owns `pdlink ping`: how long a round trip to prefill ranks takes, on the control path and over each transport."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdlink.cli.exits import WrongRun
from pdlink.cli.settings import ConfigOption, SetOption, load
from pdlink.errors import NotReady

if TYPE_CHECKING:
    from pdlink.cli.ping_rank import Path

EXAMPLES = """\b
Examples:
  pdlink ping 127.0.0.1:7400
  pdlink ping node-1:7400 --worker prefill-0/dp0.pp0.cp1.tp0 --count 100
  pdlink ping node-1:7400 --instance prefill-0 --set backends=nixl --json"""
DEFAULT_PORT = 7400


def ping(
    peer: Annotated[str, typer.Argument(metavar="PEER", help="Host and port of the bootstrap that lists the ranks.")],
    instance: Annotated[str, typer.Option(metavar="NAME", help="Of this instance (default: the only one).")] = "",
    worker: Annotated[str, typer.Option(metavar="ID", help="Only this rank (default: every one).")] = "",
    count: Annotated[int, typer.Option(min=1, max=100_000, help="Round trips on each path.")] = 20,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, max=600, metavar="SECONDS", help="For one round trip.")
    ] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    config: ConfigOption = None,
    assigned: SetOption = None,
) -> None:
    """Measure round trips to prefill ranks: a control frame and its answer, and the read of one page.

    A page is read over every transport that both sides have (PDLINK_BACKENDS), into memory of this process, and thrown
    away; nothing is written there. Exit code 1 where a path does not work.
    """
    from pdlink.address import parse_address
    from pdlink.bootstrap.access import Access
    from pdlink.bootstrap.client import BootstrapClient
    from pdlink.bootstrap.inspection_wire import look
    from pdlink.cli.output import console, note, print_json, print_table
    from pdlink.layout import fingerprint

    settings = load(config, assigned)
    place = parse_address(peer, DEFAULT_PORT)
    view = look(place, Access(settings), settings.resolve_timeout_s, instance)
    names = [one.name for one in view.instances]
    if len(names) != 1:
        fix = f"name one with --instance: {', '.join(names)}" if names else "start a prefill rank that registers there"
        raise NotReady(f"bootstrap {place} lists {len(names)} prefill instances; {fix}")
    (shown,) = view.instances
    with BootstrapClient((place,), settings) as client:
        info = client.resolve(shown.name, fingerprint(shown.layout))
    ranks = [info.rank(worker)] if worker else list(info.ranks)
    from pdlink.cli.ping_rank import Pinger  # loads torch: not before there is somebody to ping

    paths: list[Path] = []
    with Pinger(info.layout, settings, timeout_s) as pinger:
        for number, rank in enumerate(ranks):
            if not as_json:
                note(f"{rank.worker_id} ({number + 1} of {len(ranks)})")
            paths += pinger.ping(rank, count)
    if as_json:
        print_json({"instance": shown.name, "count": count, "paths": [_as_object(one) for one in paths]})
    else:
        columns = ("rank", "path", "state", "p50", "p99", "most", "bytes")
        print_table(console(), columns, [_row(one) for one in paths], left=3)
    if wrong := [one for one in paths if one.error]:
        raise WrongRun(f"{len(wrong)} of {len(paths)} paths do not work; {wrong[0].worker_id}: {wrong[0].error}")


def _row(one: Path) -> tuple[str, ...]:
    if one.error or one.skipped:
        return (one.worker_id, one.name, one.error or one.skipped, "", "", "", "")
    figures = (f"{one.quantile(q) * 1e6:,.0f} us" for q in (0.5, 0.99, 1.0))
    return (one.worker_id, one.name, "ok", *figures, f"{one.nbytes:,}" if one.nbytes else "")


def _as_object(one: Path) -> dict[str, Any]:
    said: dict[str, Any] = {"worker_id": one.worker_id, "path": one.name, "error": one.error, "skipped": one.skipped}
    said |= {"ok": not (one.error or one.skipped), "num_bytes": one.nbytes}
    quantiles = {"p50_s": 0.5, "p99_s": 0.99, "max_s": 1.0}
    return said | {name: one.quantile(q) if one.seconds else None for name, q in quantiles.items()}
