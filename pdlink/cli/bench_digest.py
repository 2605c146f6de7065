"""Owns `pdlink bench digest`: how fast pages are digested, by kind and place, and what that adds to a request.

A digest is timed in this process, over pages scattered in a pool; requests are those of two processes (`digest_rig`).
All of them take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdlink.cli.bench_transfer import LEAST_ROUNDS, Device
from pdlink.errors import BackendUnavailable, InvalidInput

if TYPE_CHECKING:
    from pdlink.cli.digest_rig import Took
    from pdlink.cli.transfer_bytes import Shape

COLUMNS = ("measured", "digests", "GB/s", "ms", "publish ms", "added ms")
LEFT = 2
LEGEND = (
    "GB/s: 1e9 bytes a second of pages. A request: publish (with digests on, the owner hashes then), and from there "
    "until decode has the pages and has compared; ms is both, added ms what digests add to it. Medians."
)
ON_DEVICE, COPIED, ON_HOST = "on the device", "on the host, from copies", "on the host"


def bench_digest(
    device: Annotated[
        Device, typer.Option(help="Where pages lie; cuda: from the first GPU to the second.")
    ] = Device.HOST,
    page_bytes: Annotated[int, typer.Option(min=64, max=1 << 24, help="Bytes of a page, a multiple of 64.")] = 41_984,
    num_pages: Annotated[int, typer.Option(min=1, max=1 << 20, help="Pages in each layer.")] = 128,
    layers: Annotated[int, typer.Option(min=1, max=4096, help="Layers.")] = 8,
    rounds: Annotated[int, typer.Option(min=LEAST_ROUNDS, max=1000, help="Measured rounds.")] = LEAST_ROUNDS,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Time page digests by kind and place, and requests with and without them."""
    from pdlink.cli.digest_rig import OFF, DigestRig
    from pdlink.cli.output import console, note, print_json, print_table
    from pdlink.cli.progress import progress
    from pdlink.cli.transfer_bytes import Shape
    from pdlink.cli.transfer_gpus import find_gpus
    from pdlink.transfer.digests import DigestKind

    if page_bytes % 64:
        raise InvalidInput(f"--page-bytes {page_bytes} is no multiple of 64")
    shape = Shape(page_bytes, num_pages, layers, scattered=True)
    gpus = find_gpus() if device is Device.CUDA else None
    devices = gpus.devices if gpus else (-1, -1)
    note(f"digests of {num_pages} scattered pages of {page_bytes:,} B x {layers} layers, {shape.nbytes / 1e6:,.1f} MB")
    settings = [OFF, *(one.value for one in DigestKind)]
    with progress("digests", (rounds + 1) * (len(DigestKind) + len(settings))) as bar:
        digests_s = time_digests(shape, devices[0], rounds, bar.step)
        note("requests")
        bar.say("requests")
        with DigestRig(settings, shape, devices) as rig:
            requests = rig.measure(rounds, bar.step)
    rows = make_rows(shape.nbytes, digests_s, requests)
    if json:
        print_json({"device": device.value, "nbytes": shape.nbytes, "page_bytes": page_bytes, "rows": rows})
        return
    print_table(console(), COLUMNS, [as_text(row) for row in rows], left=LEFT)
    note(LEGEND)


def time_digests(
    shape: Shape, device: int, rounds: int, step: Callable[[], None] = lambda: None
) -> Mapping[tuple[str, str], Sequence[float]]:
    """(place, kind) -> seconds of each round, of digests of pages in host memory (`device` -1) or on a device; `step`
    is called after each.

    Raises `BackendUnavailable` for a device that makes none.
    """
    from pdlink.backends.page_digests import PageDigests
    from pdlink.cli.transfer_memory import open_pool
    from pdlink.transfer.digests import DigestKind

    pool = open_pool(shape, device)
    digests = PageDigests()
    try:
        pool.block.fill(1)
        pages, _ = shape.pages()
        if device >= 0 and digests.choose("auto", pool.regions) is not DigestKind.MIX64:
            raise BackendUnavailable(f"device {device} makes no digests; the log says why")
        turns = {
            (_place(kind is DigestKind.MIX64, device), kind.value): partial(digests, kind, pool.regions, pages)
            for kind in DigestKind
        }
        return in_turns(turns, rounds, step)
    finally:
        digests.close()
        pool.close()


def _place(is_mix: bool, device: int) -> str:
    if device < 0:
        return ON_HOST
    return ON_DEVICE if is_mix else COPIED


def in_turns(
    turns: Mapping[tuple[str, str], Callable[[], object]], rounds: int, step: Callable[[], None] = lambda: None
) -> Mapping[tuple[str, str], list[float]]:
    """Seconds of each call in each of `rounds`, after a round that warms up."""
    taken: dict[tuple[str, str], list[float]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        for name, call in turns.items():
            began = time.perf_counter()
            call()
            if number:
                taken[name].append(time.perf_counter() - began)
            step()
    return taken


def make_rows(
    nbytes: int, digests_s: Mapping[tuple[str, str], Sequence[float]], requests: Mapping[str, Sequence[Took]]
) -> list[dict[str, Any]]:
    """Medians over the rounds; `added_ms` is that of the differences to the request without digests of that round."""
    from pdlink.cli.digest_rig import OFF

    rows: list[dict[str, Any]] = []
    for (place, kind), taken in digests_s.items():
        ms = statistics.median(taken) * 1e3
        rows.append({"measured": f"digests {place}", "digests": kind, "gbps": nbytes / ms / 1e6, "ms": ms})
    whole_s = {setting: [one.publish_s + one.request_s for one in taken] for setting, taken in requests.items()}
    for setting, taken_s in whole_s.items():
        ms = statistics.median(taken_s) * 1e3
        row = {"measured": "request over ipc", "digests": setting, "gbps": nbytes / ms / 1e6, "ms": ms}
        row["publish_ms"] = statistics.median(one.publish_s for one in requests[setting]) * 1e3
        if setting != OFF:
            pairs = zip(taken_s, whole_s[OFF], strict=True)
            row["added_ms"] = statistics.median(mine - other for mine, other in pairs) * 1e3
        rows.append(row | {"rounds_ms": [one * 1e3 for one in taken_s]})
    return rows


def as_text(row: Mapping[str, Any]) -> Sequence[str]:
    """The cells of `COLUMNS`."""
    figures = (f"{row[name]:.2f}" if name in row else "" for name in ("gbps", "ms", "publish_ms", "added_ms"))
    return (row["measured"], row["digests"], *figures)
