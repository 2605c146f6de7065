"""Owns one piece that a reader asked to have packed, as a checked value. It packs nothing and takes no slot."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pdlink.control.frames import Stage
from pdlink.errors import InvalidInput, LayoutError
from pdlink.layout.page_slices import held_runs
from pdlink.layout.parts import Part
from pdlink.layout.regions import Region
from pdlink.prefill.chunk import RankFacts
from pdlink.prefill.publication import Publication
from pdlink.transfer.ahead import MAX_PIECES, Ahead, cut_ahead
from pdlink.transfer.descriptors import Int64Array, PullBatch
from pdlink.transfer.digests import by_component, cells_in_order
from pdlink.transfer.kept import Kept
from pdlink.transfer.packing import PageTable, Piece, pack

NO_PARTS: Mapping[str, Part] = {}
MAX_TABLES, MAX_CUTS = 256, 64
"""Sets of rows, and cuts of them, that are remembered: the pieces of a rank's requests are much alike."""


@dataclass(frozen=True, slots=True, eq=False)
class StageJob:
    """Page positions [start, start + num_pages) of a publication in some rows, and the generation in which they were
    asked for."""

    publication: Publication
    generation: int
    table: PageTable
    start: int
    num_pages: int
    nbytes: int

    @property
    def is_current(self) -> bool:
        """Whether the pages are still published as they were when they were asked for."""
        return self.publication.generation == self.generation

    def copies(self, slot_address: int, merge: bool) -> PullBatch:
        """By the thread that packs; with its pages merged into runs, or one by one."""
        return pack(self.publication.pack_runs(self.start, self.num_pages, merge), self.table, slot_address)


class RowTables:
    """Where the pages of the rows that readers name lie in a rank, made once for each set of rows."""

    def __init__(self, rank: RankFacts) -> None:
        self.rank = rank
        self._tables: Kept[Hashable, tuple[PageTable, int]] = Kept(MAX_TABLES)
        self._cuts: Kept[Hashable, tuple[tuple[PageTable, Piece], ...]] = Kept(MAX_CUTS)

    def of(self, layers: Mapping[str, tuple[int, ...]], parts: Mapping[str, Part] = NO_PARTS) -> tuple[PageTable, int]:
        """The table in packing order, and the bytes of one page position in all of its rows. All are of the rank.

        Raises `LayoutError` for a part that pages of this rank cannot be cut into.
        """
        return self._tables.of(_key(layers, parts), lambda: self._make(layers, parts))

    def cut(
        self, layers: Mapping[str, tuple[int, ...]], num_pages: int, ahead: Ahead, parts: Mapping[str, Part] = NO_PARTS
    ) -> tuple[tuple[PageTable, Piece], ...]:
        """The pieces of these rows x `num_pages` as a reader cuts them, at most `ahead.num_pieces`, each with the table
        of its rows. Empty where they cannot be cut so."""
        key = _key(layers, parts), num_pages, ahead
        return self._cuts.of(key, lambda: tuple(self._cut(layers, num_pages, ahead, parts)))

    def _cut(
        self, layers: Mapping[str, tuple[int, ...]], num_pages: int, ahead: Ahead, parts: Mapping[str, Part]
    ) -> Iterator[tuple[PageTable, Piece]]:
        cells = cells_in_order(layers)
        page_bytes = self.of(layers, _only(parts, layers))[0].row_bytes
        for piece in cut_ahead(page_bytes, num_pages, ahead)[: min(ahead.num_pieces, MAX_PIECES)]:
            some = by_component(cells[piece.rows])
            yield self.of(some, _only(parts, some))[0], piece

    def _make(self, layers: Mapping[str, tuple[int, ...]], parts: Mapping[str, Part]) -> tuple[PageTable, int]:
        regions = [self.rank.regions[cell] for cell in cells_in_order(layers)]
        if not parts:
            columns = ((one.base_address, one.page_stride, one.page_bytes) for one in regions)
            table = PageTable(*(np.array(column, dtype=np.int64) for column in zip(*columns, strict=True)))
            return table, int(table.page_bytes.sum())
        runs = [self._runs(one, parts.get(one.component)) for one in regions]
        count = np.array([len(sizes) for _, sizes in runs], dtype=np.int64)
        base = np.repeat(np.array([one.base_address for one in regions], dtype=np.int64), count)
        stride = np.repeat(np.array([one.page_stride for one in regions], dtype=np.int64), count)
        nbytes = np.concatenate([sizes for _, sizes in runs])
        starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(count)])
        offsets = np.concatenate([offsets for offsets, _ in runs])
        return PageTable(base + offsets, stride, nbytes, starts), int(nbytes.sum())

    def _runs(self, region: Region, wanted: Part | None) -> tuple[Int64Array, Int64Array]:
        if wanted is None:
            return np.zeros(1, dtype=np.int64), np.array([region.page_bytes], dtype=np.int64)
        component = self.rank.layout.component(region.component)
        found = held_runs(component, self.rank.parts[component.name], wanted)
        if not len(found[0]):
            raise LayoutError(f"pages of {component.name!r} here hold {self.rank.parts[component.name]}, not {wanted}")
        return found


def build_job(tables: RowTables, publication: Publication, body: Stage, slot_bytes: int) -> StageJob:
    """Check what a reader asks against what is published. Raises `InvalidInput` with the difference."""
    asked = f"{tables.rank.worker_id} was asked to stage publication {publication.sequence}"
    strange = [
        (name, ids) for name, ids in body.layers.items() if not set(ids) <= set(publication.layers.get(name, ()))
    ]
    if strange or not any(body.layers.values()):
        raise InvalidInput(f"{asked} with {_strange(strange, publication)}")
    start = body.first_page - publication.start_page
    if start < 0 or not 1 <= body.num_pages <= len(publication.page_ids) - start:
        first = publication.start_page
        raise InvalidInput(
            f"{asked} at page positions [{body.first_page}, {body.first_page + body.num_pages}); it announces "
            f"[{first}, {first + len(publication.page_ids)})"
        )
    try:
        table, nbytes = tables.of(body.layers, body.parts)
    except LayoutError as error:
        raise InvalidInput(f"{asked} in parts: {error}") from error
    nbytes *= body.num_pages
    if nbytes > slot_bytes:
        raise InvalidInput(f"{asked} with {nbytes} bytes, and a slot has {slot_bytes}")
    return StageJob(publication, publication.generation, table, start, body.num_pages, nbytes)


def ahead_jobs(
    tables: RowTables, publication: Publication, ahead: Ahead, most: int, parts: Mapping[str, Part] = NO_PARTS
) -> list[StageJob]:
    """The first pieces of a publication, at most `most`, as a reader will ask for them that wants all of it, of
    components in `parts` what it holds.

    Empty where it cannot be cut as the reader says.
    """
    num_pages = len(publication.page_ids)
    return [
        StageJob(publication, publication.generation, table, piece.first_page, piece.num_pages, piece.nbytes)
        for table, piece in tables.cut(publication.layers, num_pages, ahead, parts)[:most]
    ]


def _key(layers: Mapping[str, tuple[int, ...]], parts: Mapping[str, Part]) -> Hashable:
    return tuple(sorted(layers.items())), tuple(sorted(parts.items(), key=lambda one: one[0]))


def _only(parts: Mapping[str, Part], layers: Mapping[str, tuple[int, ...]]) -> Mapping[str, Part]:
    return {name: part for name, part in parts.items() if layers.get(name)} if parts else NO_PARTS


def _strange(found: list[tuple[str, tuple[int, ...]]], publication: Publication) -> str:
    for name, ids in found:
        layer = next(one for one in ids if one not in publication.layers.get(name, ()))
        return f"{name!r} layer {layer}, which it does not announce"
    return "no layer"
