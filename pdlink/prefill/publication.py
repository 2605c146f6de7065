"""Owns one publication and the record of what a request has published. It sends nothing and knows no reader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from pdlink.control.frames import Ready
from pdlink.errors import StateError
from pdlink.layout.parts import Part
from pdlink.layout.regions import Region
from pdlink.transfer.descriptors import Int64Array, PageRuns
from pdlink.transfer.digests import DigestTable
from pdlink.transfer.kept import Kept
from pdlink.transfer.packing import pack_runs

MAX_KEPT_RUNS = 16

Parts: TypeAlias = tuple[tuple[str, Part], ...]
"""(component, what a reader holds of it), by name: of components of which it takes no whole pages."""
WHOLE_PAGES: Parts = ()


@dataclass(slots=True, eq=False)
class Publication:
    """Pages of layers that were declared final. `generation` changes before any of the pages is handed back.

    `digests` are for readers of those parts, `WHOLE_PAGES` among them; empty where none are made.
    """

    sequence: int
    group: str
    start_page: int
    page_ids: Int64Array
    layers: Mapping[str, tuple[int, ...]]
    generation: int
    last: bool = False
    aux: bytes | None = None
    digests: dict[Parts, DigestTable] = field(default_factory=dict)
    _runs: Kept[tuple[int, int, bool], PageRuns] = field(default_factory=lambda: Kept(MAX_KEPT_RUNS))

    def num_bytes(self, regions: Mapping[tuple[str, int], Region]) -> int:
        """Of its pages, in all of its layers."""
        return len(self.page_ids) * sum(
            regions[component, layer].page_bytes for component, layers in self.layers.items() for layer in layers
        )

    def pack_runs(self, start: int, num_pages: int, merge: bool) -> PageRuns:
        """The page pairs that pack `num_pages` from `start` on, made once: most pieces have the same pages."""
        pages = self.page_ids[start : start + num_pages]
        return self._runs.of((start, num_pages, merge), lambda: pack_runs(pages, merge))

    def is_digested(self, parts: Parts) -> bool:
        """Whether a reader of `parts` may hear of it."""
        return not self.digests or parts in self.digests

    def ready(self, staged_pieces: int = 0, parts: Parts = WHOLE_PAGES) -> Ready:
        return Ready(
            self.sequence,
            self.group,
            self.start_page,
            self.page_ids,
            self.layers,
            self.generation,
            self.last,
            self.aux,
            self.digests.get(parts),
            staged_pieces,
        )


@dataclass(frozen=True, slots=True)
class _Span:
    start: int
    stop: int


class PublishedPages:
    """What a request has published: which positions of which (component, layer), and which page holds each position.

    A position is published once in a layer, and in every layer of a page group by the same page.
    """

    def __init__(self) -> None:
        self._spans: dict[tuple[str, int], list[_Span]] = {}
        self._pages: dict[str, tuple[Int64Array, Int64Array]] = {}
        """Page group -> page ids, distinct, and the position that each one holds."""

    def add(self, group: str, layers: Mapping[str, Iterable[int]], start: int, page_ids: Int64Array) -> None:
        """Record `page_ids` at positions from `start` on. Raises `StateError`, recording nothing, for what is there."""
        stop = start + len(page_ids)
        cells = [(component, layer) for component, ids in layers.items() for layer in ids]
        for cell in cells:
            for span in self._spans.get(cell, ()):
                if span.start < stop and start < span.stop:
                    raise StateError(
                        f"{cell[0]!r} layer {cell[1]}: pages [{max(span.start, start)}, {min(span.stop, stop)}) are "
                        "published already; a page is published once"
                    )
        self._pages[group] = self._merged(group, start, page_ids)
        for cell in cells:
            spans = self._spans.setdefault(cell, [])
            if spans and spans[-1].stop == start:
                spans[-1] = replace(spans[-1], stop=stop)
            elif start < stop:
                spans.append(_Span(start, stop))

    def _merged(self, group: str, start: int, page_ids: Int64Array) -> tuple[Int64Array, Int64Array]:
        first = np.argsort(page_ids, kind="stable")
        distinct = page_ids[first]
        twice = distinct[1:][distinct[1:] == distinct[:-1]]
        if len(twice):
            raise StateError(f"page {int(twice[0])} of group {group!r} is given for two positions of one request")
        if group not in self._pages:
            return distinct, start + first
        held, positions = self._pages[group]
        again, there, here = np.intersect1d(held, distinct, assume_unique=True, return_indices=True)
        moved = positions[there] != start + first[here]
        if bool(moved.any()):
            one = int(np.argmax(moved))
            raise StateError(
                f"page {int(again[one])} of group {group!r} holds position {int(positions[there[one]])} of this "
                f"request and is given for position {start + int(first[here[one]])}"
            )
        new = np.setdiff1d(np.arange(len(distinct)), here)
        return np.concatenate([held, distinct[new]]), np.concatenate([positions, start + first[new]])
