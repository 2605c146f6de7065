"""Owns the picture of `pdlink bench read` and `pdlink bench loop`: ms over live tokens. It measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Write a line for each reader, over live tokens, both axes logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for reader in dict.fromkeys(row["reader"] for row in rows):
        points = sorted((row["live_tokens"], row["ms"]) for row in rows if row["reader"] == reader)
        axes.plot([one for one, _ in points], [ms for _, ms in points], marker="o", label=reader)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("live tokens")
    axes.set_ylabel("ms, median")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, format="png", dpi=120)
