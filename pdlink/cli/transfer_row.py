"""Owns a row of `pdlink bench transfer`: what the rounds of one case come to, as JSON and text. It measures nothing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from pdlink.cli.bench_control import summarise
from pdlink.cli.raw_rig import LAYERS, ONE_POST, PAGES, RANGE
from pdlink.cli.transfer_case import NVLINK, Case
from pdlink.cli.transfer_rig import Measured

PHASES = ("prep", "post", "pack", "wire", "unpack")
ENDS = ("head", "tail")
RAW = {PAGES: "raw", ONE_POST: "raw_one_post", LAYERS: "raw_per_layer", RANGE: "raw_large_range"}
"""What is measured of the library, and what its figures are called."""
COLUMNS = (
    *("over", "pages", "lie", "GB/s", "raw", "1 post", "layers", "large", "of raw/layers/large"),
    *("p50/p99 ms", "phases ms", "head/tail", "request", "ranges"),
)
LEFT = 3
LEGEND = (
    "GB/s: pdlink's pull; raw: the library with the same ranges, the quickest way; 1 post: all of them in one post, "
    "where that may be another; layers: as many bytes as one range a layer; large: in the best of large ranges.\n"
    f"Phases: {'/'.join(PHASES)}. Head, tail: of a staged pull, until the first read is posted and after the last has "
    "landed. Request: the whole of it, in ms. Ranges: as pages lie > as handed to the backend."
)

Row = dict[str, Any]


def make_row(case: Case, done: Measured, joined_by: str = "") -> Row:
    """Medians over the rounds; `gbps` are 1e9 bytes a second, times are milliseconds.

    `joined_by` is what joins the GPUs of a case, which is its transport where the library names none.
    """
    pulls_ms = [pull["took_s"] * 1e3 for pull in done.pulls]
    rate = _gbps(case, pulls_ms)
    last = done.pulls[-1]
    row: Row = {
        "backend": case.backend,
        "transport": joined_by if joined_by and case.transport == NVLINK else case.transport,
        "way": case.way,
        "device": case.device,
        "page_bytes": case.page_bytes,
        "num_pages": case.num_pages,
        "num_layers": case.num_layers,
        "scattered": case.scattered,
        "nbytes": case.nbytes,
        "gbps": rate,
        "p50_ms": summarise(pulls_ms)["p50_ms"],
        "p99_ms": summarise(pulls_ms)["p99_ms"],
        **{
            f"{phase}_ms": statistics.median(pull[f"{phase}_s"] for pull in done.pulls) * 1e3
            for phase in (*PHASES, *ENDS)
        },
        "request_ms": statistics.median(pull["request_s"] for pull in done.pulls) * 1e3,
        "num_cells": case.num_pages * case.num_layers,
        "num_descriptors": last["num_posted"] if case.way == "staged" else last["num_descriptors"],
        "rounds_ms": pulls_ms,
    }
    for what, name in RAW.items():
        took_ms = [one * 1e3 for one in done.raw_s.get(what, ())]
        raw_rate = _gbps(case, took_ms) if took_ms else None
        row[f"{name}_gbps"], row[f"of_{name}"] = raw_rate, rate / raw_rate if raw_rate else None
        row[f"{name}_setting"], row[f"{name}_rounds_ms"] = done.settings.get(what), took_ms
    return row


def as_text(row: Row) -> Sequence[str]:
    """The cells of `COLUMNS`."""
    return (
        over(row),
        f"{row['num_pages']} x {_size(row['page_bytes'])} x {row['num_layers']}",
        "scattered" if row["scattered"] else "contiguous",
        *(_rate(row[name]) for name in ("gbps", *(f"{name}_gbps" for name in RAW.values()))),
        "/".join(f"{row[f'of_{RAW[what]}']:.0%}" for what in (PAGES, LAYERS, RANGE)),
        f"{row['p50_ms']:.1f}/{row['p99_ms']:.1f}",
        "/".join(f"{row[f'{phase}_ms']:.1f}" for phase in PHASES),
        "/".join(f"{row[f'{end}_ms']:.2f}" for end in ENDS) if row["way"] == "staged" else "",
        f"{row['request_ms']:.1f}",
        f"{row['num_cells']} > {row['num_descriptors']}",
    )


def over(row: Row) -> str:
    """What moved the pages, in words."""
    return f"{row['backend']} {row['transport']} {row['way']}"


def _gbps(case: Case, took_ms: Sequence[float]) -> float:
    return case.nbytes / statistics.median(took_ms) / 1e6


def _rate(gbps: float | None) -> str:
    return "" if gbps is None else f"{gbps:.2f}"


def _size(nbytes: int) -> str:
    return f"{nbytes // 1024} KiB" if nbytes % 1024 == 0 else f"{nbytes} B"
