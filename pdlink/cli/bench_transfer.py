"""Owns `pdlink bench transfer`: a sweep over backends, ways and shapes of pages, each beside the raw library.

What is timed of pdlink is its pull, from a prefill rank in one process to a decode rank in another, as the decode side
reports it. The raw library moves the same ranges, and as many bytes as a large range, in processes that know nothing of
pdlink. The three take turns, and every round's bytes are checked.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdlink.errors import ConfigError, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TextIO

    from pdlink.cli.progress import Steps
    from pdlink.cli.transfer_case import Case
    from pdlink.cli.transfer_gpus import Gpus
    from pdlink.cli.transfer_many import Group
    from pdlink.cli.transfer_row import Row

LEAST_ROUNDS = 7


class BackendName(StrEnum):
    IPC = "ipc"
    NIXL = "nixl"
    MOONCAKE = "mooncake"


class TransportName(StrEnum):
    """What a backend's library is made to use."""

    SHM = "shm"
    CMA = "cma"
    TCP = "tcp"
    NVLINK = "nvlink"
    NVLINK_INTRA = "nvlink_intra"


class WayName(StrEnum):
    DIRECT = "direct"
    STAGED = "staged"
    MAPPED = "mapped"


class Device(StrEnum):
    HOST = "host"
    CUDA = "cuda"


class Damaged(StrEnum):
    """Whose source has a word changed before it is read."""

    NONE = "none"
    PDLINK = "pdlink"
    RAW = "raw"


def bench_transfer(
    goals: Annotated[
        bool,
        typer.Option("--goals", help="Only the cases that there are goals for on this device, and which are reached."),
    ] = False,
    backend: Annotated[list[BackendName] | None, typer.Option(help="Repeat (default: each that works here).")] = None,
    transport: Annotated[
        list[TransportName] | None, typer.Option(help="What the library moves over; repeat (default: each).")
    ] = None,
    way: Annotated[
        list[WayName] | None, typer.Option(help="Repeat (default: mapped of ipc, direct and staged of others).")
    ] = None,
    page_bytes: Annotated[
        list[int] | None, typer.Option(min=8, max=1 << 30, help="Bytes of a page; repeat (default 65536).")
    ] = None,
    num_pages: Annotated[
        list[int] | None, typer.Option(min=1, max=1 << 20, help="Pages in each layer; repeat (default 256).")
    ] = None,
    layers: Annotated[list[int] | None, typer.Option(min=1, max=4096, help="Layers; repeat (default 4).")] = None,
    scattered: Annotated[
        bool | None, typer.Option("--scattered/--contiguous", help="How pages lie (default: both).")
    ] = None,
    owners: Annotated[
        int, typer.Option(min=1, max=64, help="Prefill ranks that split the layers, all pulled from at once.")
    ] = 1,
    readers: Annotated[
        int, typer.Option(min=1, max=64, help="Decode ranks that each pull a request of their own, all at once.")
    ] = 1,
    raw: Annotated[
        bool, typer.Option("--raw/--no-raw", help="The library itself beside several owners or readers.")
    ] = True,
    rounds: Annotated[int, typer.Option(min=LEAST_ROUNDS, max=1000, help="Measured rounds of a row.")] = LEAST_ROUNDS,
    device: Annotated[
        Device, typer.Option(help="Where pages lie; cuda: from the first GPU to the second.")
    ] = Device.HOST,
    inject: Annotated[Damaged, typer.Option(help="Damage a source: the check must fail (exit 1).")] = Damaged.NONE,
    json: Annotated[bool, typer.Option("--json", help="A JSON list of rows.")] = False,
    rows: Annotated[
        Path | None, typer.Option("--rows", help="Append each row to this file as a line of JSON, as it comes.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the rates into this .png file.")] = None,
) -> None:
    """Time pulls of pages over real processes on this host, beside the library's own rate."""
    from contextlib import ExitStack
    from json import dumps

    from pdlink.cli import transfer_goals, transfer_many
    from pdlink.cli.output import console, note, print_table
    from pdlink.cli.progress import progress
    from pdlink.cli.transfer_case import sweep
    from pdlink.cli.transfer_many import Group
    from pdlink.cli.transfer_plot import check_plot, draw
    from pdlink.cli.transfer_row import COLUMNS, LEFT, LEGEND, as_text

    if plot:
        check_plot(plot)
    is_many = owners > 1 or readers > 1
    _refuse_many(is_many, goals, raw, plot)
    if goals:
        _refuse_shapes(transport, way, page_bytes, num_pages, layers, scattered)
        wanted = {one.value for one in backend or BackendName}
        cases = [case for case in transfer_goals.cases(device.value) if case.backend in wanted]
    else:
        cases = list(
            sweep(
                [one.value for one in backend or BackendName],
                [one.value for one in transport or ()],
                [one.value for one in way or ()],
                page_bytes or [65_536],
                num_pages or [256],
                layers or [4],
                [True, False] if scattered is None else [scattered],
                device.value,
            )
        )
    _check_settings(cases)
    measured = []
    with ExitStack() as stack:
        file = stack.enter_context(_open_rows(rows)) if rows else None
        bar = stack.enter_context(progress("rows", len(cases)))
        group = Group(owners, readers) if is_many else None
        for row in _measure(cases, group, rounds, inject.value, bar, must_work=backend is not None, with_raw=raw):
            if not is_many:
                row["goals"] = transfer_goals.judged(row)
            measured.append(row)
            if file:
                print(dumps(row), file=file, flush=True)
    if plot:
        draw(measured, plot)
    if json:
        print(dumps(measured), flush=True)
        return
    if is_many:
        many = [transfer_many.as_text(row) for row in measured]
        print_table(console(), transfer_many.COLUMNS, many, left=transfer_many.LEFT)
        note(transfer_many.LEGEND)
        return
    print_table(console(), COLUMNS, [as_text(row) for row in measured], left=LEFT)
    if goals:
        told = [line for row in measured for line in transfer_goals.as_text(row)]
        print_table(console(), transfer_goals.COLUMNS, told, left=transfer_goals.LEFT)
    note(LEGEND)


def _refuse_shapes(*options: object) -> None:
    """`--goals` says itself what to measure. Raises `InvalidInput` for an option that says something else."""
    if any(one is not None for one in options):
        raise InvalidInput("--goals says what is measured; of the options that do so it takes --backend and --device")


def _refuse_many(is_many: bool, goals: bool, raw: bool, plot: Path | None) -> None:
    """Raises `InvalidInput` for what is there for one owner and one reader only, or for several only."""
    if is_many and (goals or plot):
        raise InvalidInput(f"{'--goals' if goals else '--plot'} is for one owner and one reader; leave one of them out")
    if not (raw or is_many):
        raise InvalidInput(
            "--no-raw is for --owners or --readers of more than 1; of one pull the baseline is the point"
        )


def _check_settings(cases: Sequence[Case]) -> None:
    """Refuse settings here that would stop a child later, with less to say. Raises `ConfigError`."""
    from pdlink.config import load_settings

    settings = load_settings()
    if not settings.staging_slots and any(case.way == WayName.STAGED for case in cases):
        raise ConfigError("--way staged needs staging slots, and PDLINK_STAGING_SLOTS is 0")


def _open_rows(path: Path) -> TextIO:
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"--rows {path} cannot be written: {error.strerror}") from error


def _measure(
    cases: Sequence[Case],
    group: Group | None,
    rounds: int,
    inject: str,
    bar: Steps,
    *,
    must_work: bool,
    with_raw: bool,
) -> Iterator[Row]:
    """Each case's row as it comes. A backend that does not work here is left out and said, unless it was asked for.

    `group` are several owners or readers, None for one of each.
    """
    from itertools import groupby

    from pdlink.cli.output import note
    from pdlink.cli.transfer_gpus import find_gpus
    from pdlink.cli.transfer_talk import Unavailable

    found = False
    reasons = []
    gpus = find_gpus() if cases[0].device == Device.CUDA else None
    if group:
        group.check(cases, gpus)
    for _, some in groupby(cases, key=lambda case: case.link):
        link = list(some)
        try:
            for row in (
                _many(link, group, gpus, rounds, inject, bar, with_raw)
                if group
                else _pairs(link, gpus, rounds, inject, bar)
            ):
                yield row
                bar.step()
                found = True
        except Unavailable as error:
            if must_work:
                raise
            bar.step(len(link))
            reasons.append(f"{link[0].backend} over {link[0].transport}: {error}")
            note(f"left out {reasons[-1]}")
    if not found:
        raise Unavailable(f"no backend works here ({'; '.join(reasons)})")


def _pairs(link: Sequence[Case], gpus: Gpus | None, rounds: int, inject: str, bar: Steps) -> Iterator[Row]:
    """The rows of one link: its processes serve one case after another."""
    from pdlink.cli.output import note
    from pdlink.cli.transfer_rig import Rig
    from pdlink.cli.transfer_row import make_row

    with Rig(link[0], gpus) as rig:
        for case in link:
            note(str(case))
            bar.say(f"{case.backend} over {case.transport}")
            yield make_row(case, rig.measure(case, rounds, inject), gpus.joined_by if gpus else "")


def _many(
    link: Sequence[Case], group: Group, gpus: Gpus | None, rounds: int, inject: str, bar: Steps, with_raw: bool
) -> Iterator[Row]:
    """The rows of several owners or readers: each case has processes of its own."""
    from pdlink.cli.output import note
    from pdlink.cli.transfer_many import ManyRig, make_row

    for case in link:
        note(f"{case}, {group.owners} owners x {group.readers} readers")
        bar.say(f"{case.backend} over {case.transport}")
        with ManyRig(case, group, gpus, with_raw=with_raw) as rig:
            yield make_row(case, group, rig.measure(rounds, inject), gpus.joined_by if gpus else "")
