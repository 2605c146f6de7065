"""Owns the arrays that processes of a run leave for each other: page bytes and logits, as .npy files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pdlink.layout.components import CacheLayout
from pdlink_engines.reference.page_bytes import Cell


def save_pages(folder: Path, pages: Mapping[Cell, torch.Tensor]) -> None:
    """One file per (component, layer): uint8 [pages of the request, page_bytes]."""
    folder.mkdir(parents=True, exist_ok=True)
    for (component, layer), rows in pages.items():
        np.save(folder / f"{component}.{layer}.npy", rows.numpy(), allow_pickle=False)


def save_logits(path: Path, logits: torch.Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, logits.numpy(), allow_pickle=False)


def load_logits(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.load(path, allow_pickle=False))


@dataclass(frozen=True, slots=True)
class PageDifference:
    """The first page of a request in which the received bytes are not the expected ones."""

    request_id: str
    component: str
    layer: int
    page: int
    byte: int

    def __str__(self) -> str:
        return f"component {self.component!r}, layer {self.layer}, page {self.page} differs from byte {self.byte} on"


def find_difference(layout: CacheLayout, request_id: str, expected: Path, received: Path) -> PageDifference | None:
    """Compare the pages of a request in two folders, byte for byte, layer by layer."""
    for layer, component in sorted((layer, component) for component, layer in layout.cells()):
        name = f"{component}.{layer}.npy"
        ours = np.load(expected / name, allow_pickle=False)
        theirs = np.load(received / name, allow_pickle=False)
        if ours.shape != theirs.shape:
            return PageDifference(request_id, component, layer, min(len(ours), len(theirs)), 0)
        wrong = np.argwhere(ours != theirs)
        if len(wrong):
            return PageDifference(request_id, component, layer, int(wrong[0][0]), int(wrong[0][1]))
    return None
