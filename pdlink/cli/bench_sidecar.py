"""Owns `pdlink bench sidecar`: what a link beside an engine takes from it, in memory and in the time of its steps.

What it measures, and figures: `bench_sidecar.md`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

FIGURES = ("alone p50 ms", "p99", "with requests p50 ms", "p99", "requests", "GB/s", "link MiB")
"""Of steps, alone and while requests are packed and pulled; the device memory that the link takes beside its slots."""


class WhereName(StrEnum):
    """Where the engine's link is."""

    IN_PROCESS = "in-process"
    SIDECAR = "sidecar"
    SIDECAR_MPS = "sidecar-mps"


class DeviceName(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


def bench_sidecar(
    device: Annotated[DeviceName, typer.Option(help="Where the engine computes and has its pool.")] = DeviceName.CPU,
    where: Annotated[list[WhereName] | None, typer.Option(help="Where the link is; repeat (default: each).")] = None,
    seconds: Annotated[float, typer.Option(min=0.2, max=3600, help="Of steps alone, and as long with requests.")] = 5.0,
    products: Annotated[int, typer.Option(min=1, max=100_000, help="Matrix products of a step.")] = 40,
    pages: Annotated[int, typer.Option(min=1, max=1 << 20, help="Pages of a request, 41,984 bytes a layer.")] = 256,
    layers: Annotated[int, typer.Option(min=1, max=4096, help="Layers.")] = 8,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Time an engine's steps while its pages are packed and pulled: by a link in process, and by a sidecar's."""
    from pdlink.cli import mps
    from pdlink.cli.bench_control import summarise
    from pdlink.cli.beside_rig import Load, measure
    from pdlink.cli.output import console, note, print_json, print_table
    from pdlink.cli.progress import progress
    from pdlink.cli.transfer_gpus import find_gpus

    on_gpu = device is DeviceName.CUDA
    reader_device = find_gpus().devices[1] if on_gpu else 0
    load = Load(on_gpu, products, 4096 if on_gpu else 256, layers, pages, reader_device)
    rows: list[dict[str, object]] = []
    table: list[list[str]] = []
    wanted = list(where or WhereName)
    with progress("places of the link", len(wanted)) as bar:
        for one in wanted:
            with_mps = one is WhereName.SIDECAR_MPS
            if with_mps and (reason := mps.why_not() if on_gpu else "MPS is for GPUs"):
                note(f"{one}: left out: {reason}")
                rows.append({"where": one.value, "left_out": reason})
                table.append([one.value, reason, *("",) * len(FIGURES)])
                bar.step()
                continue
            note(f"{one}: starting an engine, its link and a decode side; {2 * seconds:g} s of steps")
            found = measure(load, seconds, beside=one is not WhereName.IN_PROCESS, with_mps=with_mps)
            alone, busy = summarise(found.alone_ms), summarise(found.beside_ms)
            rows.append(
                {
                    "where": one.value,
                    "alone": {"num_steps": len(found.alone_ms), **alone},
                    "with_requests": {"num_steps": len(found.beside_ms), **busy},
                    "num_requests": found.num_requests,
                    "bytes_per_s": found.bytes_per_s,
                    "ways": list(found.ways),
                    "link_bytes": found.link_bytes,
                }
            )
            steps = [f"{figures[name]:.3f}" for figures in (alone, busy) for name in ("p50_ms", "p99_ms")]
            moved = [f"{found.num_requests:,}", f"{found.bytes_per_s / 1e9:.1f}", f"{found.link_bytes / (1 << 20):.0f}"]
            table.append([one.value, ", ".join(found.ways), *steps, *moved])
            bar.step()
    if json:
        print_json({"rows": rows, "device": device.value, "num_layers": layers, "num_pages": pages})
        return
    print_table(console(), ("where", "way", *FIGURES), table, left=2)
