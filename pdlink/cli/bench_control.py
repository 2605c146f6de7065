"""Owns `pdlink bench control`: from the last publish to success on the decode side, and how it is summed up."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer

WARM_UP = 50


class CallerName(StrEnum):
    """How the decode side learns that a request has ended."""

    WAIT = "wait"
    POLL_LOOP = "poll-loop"
    BUSY = "busy"


class WayName(StrEnum):
    """Where the link of every rank is."""

    IN_PROCESS = "in-process"
    SIDECAR = "sidecar"


def bench_control(
    samples: Annotated[int, typer.Option(min=1, max=1_000_000, help="Requests of a row.")] = 2000,
    cp: Annotated[list[int] | None, typer.Option(min=1, max=64, help="Prefill ranks; repeat (default 1, 4).")] = None,
    caller: Annotated[
        list[CallerName] | None, typer.Option(help="How the end is learnt; repeat (default: each).")
    ] = None,
    way: Annotated[list[WayName] | None, typer.Option(help="Where the links are; repeat (default: each).")] = None,
    layers: Annotated[int, typer.Option(min=1, max=4096, help="Layers, each a page of 4 KiB.")] = 8,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Time one page from its last publish to success, over real processes on this host."""
    import os

    from pdlink.cli.control_rank import BYTES_PER_TOKEN, PAGE_SIZE
    from pdlink.cli.control_rig import CALLERS, Rig
    from pdlink.cli.output import console, note, print_json, print_table
    from pdlink.cli.progress import progress
    from pdlink.config import load_settings

    load_settings()  # refused here rather than in a child
    callers = [one.value for one in caller or CallerName]
    rows: list[dict[str, object]] = []
    rigs = list(itertools.product(cp or [1, 4], way or WayName))
    with progress("requests", len(rigs) * len(callers) * samples) as bar:
        for size, where in rigs:
            note(f"cp {size}, {where}: starting {size} prefill rank(s) and a bootstrap service")
            with Rig(size, layers, beside=where is WayName.SIDECAR) as rig:
                for name in callers:
                    note(f"cp {size}, {where}: {samples:,} requests, caller {name}")
                    for _ in range(min(WARM_UP, samples)):
                        rig.measure_ms(CALLERS[name])
                    taken = []
                    for _ in range(samples):
                        taken.append(rig.measure_ms(CALLERS[name]))
                        bar.step()
                    what: dict[str, object] = {"way": where.value, "caller": name, "cp": size, "samples": samples}
                    rows.append(what | summarise(taken))
    if json:
        page_bytes = PAGE_SIZE * BYTES_PER_TOKEN
        print_json(
            {"rows": rows, "num_pages": 1, "num_layers": layers, "page_bytes": page_bytes, "cpus": os.cpu_count()}
        )
        return
    figures = ("p50_ms", "p99_ms", "mean_ms", "max_ms")
    table = [
        [
            str(row["way"]),
            str(row["caller"]),
            str(row["cp"]),
            f"{row['samples']:,}",
            *(f"{row[one]:.3f}" for one in figures),
        ]
        for row in rows
    ]
    heads = ("p50 ms", "p99 ms", "mean ms", "max ms")
    print_table(console(), ("way", "caller", "cp", "samples", *heads), table, left=2)


def summarise(taken_ms: Sequence[float]) -> dict[str, float]:
    """Percentiles by nearest rank: each is a figure that was measured."""
    ordered = sorted(taken_ms)

    def percentile(share: float) -> float:
        return ordered[max(0, -(-len(ordered) * round(share * 100) // 100) - 1)]

    return {
        "p50_ms": percentile(0.5),
        "p99_ms": percentile(0.99),
        "mean_ms": sum(ordered) / len(ordered),
        "max_ms": ordered[-1],
    }
