"""Owns one publication and the record of what a request has published. It sends nothing and knows no reader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pdlink.control.frames import Ready
from pdlink.errors import StateError
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.digests import Digests


@dataclass(slots=True, eq=False)
class Publication:
    """Pages of layers that were declared final. `generation` changes before any of the pages is handed back."""

    sequence: int
    group: str
    start_page: int
    page_ids: Int64Array
    layers: Mapping[str, tuple[int, ...]]
    generation: int
    last: bool = False
    aux: bytes | None = None
    digests: Digests | None = None

    def ready(self) -> Ready:
        return Ready(
            self.sequence,
            self.group,
            self.start_page,
            self.page_ids,
            self.layers,
            self.generation,
            self.last,
            self.aux,
            self.digests,
        )


@dataclass(frozen=True, slots=True)
class _Span:
    start: int
    stop: int


class PublishedPages:
    """Which page positions of which (component, layer) are published. A page is published once."""

    def __init__(self) -> None:
        self._spans: dict[tuple[str, int], list[_Span]] = {}

    def add(self, layers: Mapping[str, Iterable[int]], start: int, stop: int) -> None:
        """Record [start, stop) of `layers`. Raises `StateError`, recording nothing, when a page is there already."""
        cells = [(component, layer) for component, ids in layers.items() for layer in ids]
        for cell in cells:
            for span in self._spans.get(cell, ()):
                if span.start < stop and start < span.stop:
                    raise StateError(
                        f"{cell[0]!r} layer {cell[1]}: pages [{max(span.start, start)}, {min(span.stop, stop)}) are "
                        "published already; a page is published once"
                    )
        for cell in cells:
            spans = self._spans.setdefault(cell, [])
            if spans and spans[-1].stop == start:
                spans[-1] = replace(spans[-1], stop=stop)
            elif start < stop:
                spans.append(_Span(start, stop))
