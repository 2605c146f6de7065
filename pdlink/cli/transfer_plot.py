"""Owns the picture of `pdlink bench transfer`: rates of pdlink beside the library's own. It measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdlink.errors import BackendUnavailable, InvalidInput

BARS = (
    ("gbps", "pdlink", "tab:blue"),
    ("raw_gbps", "the library, same descriptors", "tab:orange"),
    ("raw_per_layer_gbps", "the library, a range a layer", "tab:olive"),
    ("raw_large_range_gbps", "the library, best large range", "tab:gray"),
)
ROW_INCHES = 0.55


def check_plot(path: Path) -> None:
    """Raise before anything is measured what would keep the picture from being written."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise BackendUnavailable("--plot needs matplotlib; pip install 'pdlink[bench]'") from error
    if path.suffix.lower() != ".png":
        raise InvalidInput(f"--plot {path} is no .png file")
    if not path.parent.is_dir():
        raise InvalidInput(f"--plot {path}: there is no folder {path.parent}")


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the rows as bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.6 + ROW_INCHES * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    height = 0.8 / len(BARS)
    for number, (name, label, colour) in enumerate(BARS):
        places = [row + number * height for row in range(len(rows))]
        axes.barh(places, [row[name] for row in rows], height, label=label, color=colour)
    axes.set_yticks([row + height for row in range(len(rows))], [_label(row) for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("GB/s (1e9 bytes a second), median")
    axes.legend(loc="lower right")
    figure.savefig(path, format="png", dpi=120)


def _label(row: dict[str, Any]) -> str:
    how = "scattered" if row["scattered"] else "contiguous"
    size = f"{row['num_pages']} x {row['page_bytes']} B x {row['num_layers']} {how}"
    return f"{row['backend']} {row['transport']} {row['way']}\n{size}"
