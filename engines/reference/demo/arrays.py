"""Owns the arrays that processes of a run leave for each other: page bytes and logits, as .npy files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pdlink.layout.components import CacheLayout, Component
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
    """The first page of a request in which the received bytes are not the expected ones.

    `byte` counts in the page of the decode rank that received it, `reader` (empty where there is one only).
    """

    request_id: str
    component: str
    layer: int
    page: int
    byte: int
    reader: str = ""

    def __str__(self) -> str:
        at = f" ({self.reader})" if self.reader else ""
        return (
            f"component {self.component!r}, layer {self.layer}, page {self.page} differs from byte {self.byte} on{at}"
        )


@dataclass(frozen=True, slots=True)
class Received:
    """What one decode rank received: `folder` has its pages in `layout`, of which fields with heads keep `heads`."""

    folder: Path
    layout: CacheLayout
    heads: range | None = None
    reader: str = ""


def find_difference(layout: CacheLayout, request_id: str, expected: Path, received: Received) -> PageDifference | None:
    """Compare pages of a request, byte for byte, layer by layer; `expected` has them in `layout`, with all heads."""
    for layer, component in sorted((layer, component) for component, layer in layout.cells()):
        name = f"{component}.{layer}.npy"
        whole = np.load(expected / request_id / name, allow_pickle=False)
        ours = keep_heads(whole, layout.component(component), received.layout.component(component), received.heads)
        theirs = np.load(received.folder / request_id / name, allow_pickle=False)
        if ours.shape != theirs.shape:
            page = min(len(ours), len(theirs))
            return PageDifference(request_id, component, layer, page, 0, received.reader)
        wrong = np.argwhere(ours != theirs)
        if len(wrong):
            return PageDifference(request_id, component, layer, int(wrong[0][0]), int(wrong[0][1]), received.reader)
    return None


def keep_heads(pages: np.ndarray, whole: Component, kept: Component, heads: range | None) -> np.ndarray:
    """uint8 pages of `whole` as pages of `kept`, with `heads` of its fields that have several; padding is zero.

    The link has code of its own for this, which is what the demo proves: none of it is used here.
    """
    if heads is None:
        return pages
    found = np.zeros((len(pages), kept.page_bytes), dtype=np.uint8)
    for field in whole.fields:
        offsets = np.arange(field.bytes_per_token)
        source = field.starts(whole.page_size)[:, heads.start : heads.stop, None] + offsets
        target = kept.field(field.name).starts(kept.page_size)[:, :, None] + offsets
        found[:, target.reshape(-1)] = pages[:, source.reshape(-1)]
    return found
