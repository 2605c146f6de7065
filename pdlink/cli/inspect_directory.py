"""Owns `pdlink inspect`: what a bootstrap lists, as tables and a picture of who owns which layer, or as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdlink.cli.settings import ConfigOption, SetOption, load

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pdlink.bootstrap.inspection import DirectoryView, InstanceView, WorkerView

EXAMPLES = """\b
Examples:
  pdlink inspect 127.0.0.1:7400
  pdlink inspect node-1:7400 --instance prefill-0 --watch
  pdlink inspect node-1:7400 --json | jq '.instances[].not_ready'"""
DEFAULT_PORT = 7400
MAX_ROWS = 64
"""Of one picture or table. JSON has all."""
WIDTH = 64
"""Layers of a picture; of more, several share a place."""
OWNED, PARTLY, NOT_OWNED, MISSING, TWICE = "#", "+", ".", "!", "2"
LEGEND = f"{OWNED} owned  {PARTLY} partly  {NOT_OWNED} not; last line: {MISSING} without an owner, {TWICE} with several"


def inspect(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="Host and port of a bootstrap.")],
    instance: Annotated[str, typer.Option(metavar="NAME", help="Only this instance.")] = "",
    watch: Annotated[bool, typer.Option("--watch", help="Go on until Ctrl-C.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, max=3600, metavar="SECONDS", help="Between two looks.")
    ] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a look.")] = False,
    config: ConfigOption = None,
    assigned: SetOption = None,
) -> None:
    """Show who is registered, which rank owns which layers, what is missing, leases and incarnations.

    The token and TLS settings are those of every caller: PDLINK_TOKEN_FILE, PDLINK_TLS_CA and so on.
    """
    from pdlink.address import parse_address
    from pdlink.bootstrap.access import Access
    from pdlink.bootstrap.inspection_wire import look
    from pdlink.cli.output import console, print_json

    settings = load(config, assigned)
    place, access = parse_address(address, DEFAULT_PORT), Access(settings)

    def looks() -> Iterator[DirectoryView]:
        yield look(place, access, settings.resolve_timeout_s, instance)
        while watch:
            time.sleep(interval_s)
            yield look(place, access, settings.resolve_timeout_s, instance)

    if as_json:
        for view in looks():
            print_json(as_object(view))
        return
    out = console()
    if not watch or not out.is_terminal:
        for view in looks():
            out.print(picture(view, str(place)))
        return
    from rich.live import Live

    with Live(console=out, screen=True, auto_refresh=False) as live:
        for view in looks():
            live.update(picture(view, str(place)), refresh=True)


def as_object(view: DirectoryView) -> dict[str, Any]:
    """Everything that is shown, and more, as plain values. Layers are pairs of first and last."""
    return {"lease_s": view.lease_s, "instances": [_instance_object(one) for one in view.instances]}


def _instance_object(one: InstanceView) -> dict[str, Any]:
    from pdlink.cli.plan import spans

    coverage = {}
    for component in one.layout.components:
        owners = one.owners(component.name)
        coverage[component.name] = {
            "plan": one.kinds[component.name].value,
            "layers": spans(component.layers),
            "without_owner": [layer for layer, names in owners.items() if not names],
            "owners": {str(layer): names for layer, names in owners.items()},
        }
    return {
        "name": one.name,
        "version": one.version,
        "ready": not one.not_ready,
        "not_ready": one.not_ready,
        "protocol": str(one.protocol),
        "sizes": {"dp": one.sizes.dp, "pp": one.sizes.pp, "cp": one.sizes.cp, "tp": one.sizes.tp},
        "num_ranks": one.sizes.num_ranks,
        "components": coverage,
        "workers": [_worker_object(worker) for worker in one.workers],
    }


def _worker_object(one: WorkerView) -> dict[str, Any]:
    from pdlink.cli.plan import spans

    return {
        "worker_id": one.worker_id,
        "incarnation": one.incarnation,
        "rank": str(one.coordinates),
        "control_endpoint": str(one.control_endpoint),
        "transports": list(one.transports),
        "curve": one.has_control_keys,
        "staging_slots": one.num_staging_slots,
        "staging_slot_bytes": one.staging_slot_bytes,
        "lease_left_s": round(one.lease_left_s, 3),
        "owned": {name: spans(layers) for name, layers in one.owned.items()},
    }


def picture(view: DirectoryView, place: str) -> RenderableType:
    """The whole directory for a terminal."""
    from rich.console import Group
    from rich.text import Text

    num_workers = sum(len(one.workers) for one in view.instances)
    head = f"bootstrap {place}: {len(view.instances)} instances, {num_workers} workers, leases of {view.lease_s:g} s"
    parts: list[RenderableType] = [Text(head)]
    for one in view.instances:
        parts += [Text(), *_instance_picture(one)]
    return Group(*parts)


def _instance_picture(one: InstanceView) -> list[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    sizes = one.sizes
    state = "NOT READY" if one.not_ready else "ready"
    head = f"{one.name}: {state}, {len(one.workers)} of {sizes.num_ranks} ranks (dp {sizes.dp} pp {sizes.pp} "
    head += f"cp {sizes.cp} tp {sizes.tp}), {one.layout.num_layers} layers, protocol {one.protocol}"
    parts: list[RenderableType] = [Text(head, style="bold red" if one.not_ready else "bold green")]
    if one.not_ready:
        parts.append(Text(f"  {one.not_ready}", style="red"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("worker", "incarnation", "lease left", "control", "transports", "staging"):
        table.add_column(column, justify="right" if column == "lease left" else "left", no_wrap=True)
    for worker in one.workers[:MAX_ROWS]:
        staging = f"{worker.num_staging_slots} x {worker.staging_slot_bytes >> 20} MiB"
        control = f"{worker.control_endpoint}{' (CURVE)' if worker.has_control_keys else ''}"
        lease = f"{max(0.0, worker.lease_left_s):.1f} s"
        transports = ", ".join(worker.transports)
        row = (worker.worker_id, str(worker.incarnation), lease, control, transports)
        table.add_row(*row, staging if worker.num_staging_slots else "none")
    parts.append(table)
    if len(one.workers) > MAX_ROWS:
        parts.append(Text(f"and {len(one.workers) - MAX_ROWS} more; --json has all"))
    maps: dict[tuple[str, ...], list[str]] = {}
    for component in one.layout.components:
        maps.setdefault(tuple(ownership(one, component.name)), []).append(component.name)
    for rows, names in maps.items():
        kinds = {one.kinds[name].value for name in names}
        parts += [Text(f"\n{', '.join(names)} ({', '.join(sorted(kinds))}):"), *(Text(f"  {row}") for row in rows)]
    parts.append(Text(f"  {LEGEND}", style="dim"))
    return parts


def ownership(one: InstanceView, component: str) -> list[str]:
    """The map of one component: a line of layer ids, one for each live rank of the first dp group, and one that says
    where something is wrong. Each place stands for one layer, or for several where there are more than `WIDTH`."""
    layers = one.layout.component(component).layers
    each = max(1, -(-len(layers) // WIDTH))
    places = [layers[start : start + each] for start in range(0, len(layers), each)]
    workers = [worker for worker in one.workers if worker.coordinates.dp == 0][:MAX_ROWS]
    names = [str(worker.coordinates) for worker in workers]
    width = max([len(name) for name in names] + [len("layer")])
    ends = f"{layers[0]}{str(layers[-1]).rjust(max(0, len(places) - len(str(layers[0]))))}" if layers else ""
    rows = [f"{'layer'.ljust(width)}  {ends}"]
    for name, worker in zip(names, workers, strict=True):
        owned = set(worker.owned.get(component, ()))
        rows.append(f"{name.ljust(width)}  {''.join(_mark(owned, place) for place in places)}".rstrip())
    owners = one.owners(component)
    is_split = one.kinds[component].value == "split"
    faults = "".join(_fault([len(owners[layer]) for layer in place], is_split) for place in places)
    return [*rows, f"{''.ljust(width)}  {faults}"] if faults.strip() else rows


def _mark(owned: set[int], place: tuple[int, ...]) -> str:
    num_owned = sum(layer in owned for layer in place)
    return NOT_OWNED if not num_owned else OWNED if num_owned == len(place) else PARTLY


def _fault(counts: list[int], is_split: bool) -> str:
    if not all(counts):
        return MISSING
    return TWICE if is_split and max(counts) > 1 else " "
