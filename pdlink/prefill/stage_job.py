"""Owns one piece that a reader asked to have packed, as a checked value. It packs nothing and takes no slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pdlink.control.frames import Stage
from pdlink.errors import InvalidInput
from pdlink.prefill.chunk import RankFacts
from pdlink.prefill.publication import Publication
from pdlink.transfer.descriptors import Int64Array, PullBatch
from pdlink.transfer.digests import cells_in_order
from pdlink.transfer.packing import PageTable, pack


@dataclass(frozen=True, slots=True, eq=False)
class StageJob:
    """Pages (int64 [n] of this rank's pool) of some rows, and the generation in which they were asked for."""

    publication: Publication
    generation: int
    table: PageTable
    pages: Int64Array
    nbytes: int

    @property
    def is_current(self) -> bool:
        """Whether the pages are still published as they were when they were asked for."""
        return self.publication.generation == self.generation

    def copies(self, slot_address: int) -> PullBatch:
        return pack(self.pages, self.table, slot_address)


def build_job(rank: RankFacts, publication: Publication, body: Stage, slot_bytes: int) -> StageJob:
    """Check what a reader asks against what is published. Raises `InvalidInput` with the difference."""
    asked = f"{rank.worker_id} was asked to stage publication {publication.sequence}"
    cells = cells_in_order(body.layers)
    strange = [cell for cell in cells if cell[1] not in publication.layers.get(cell[0], ())]
    if strange or not cells:
        named = f"{strange[0][0]!r} layer {strange[0][1]}" if strange else "no layer"
        raise InvalidInput(f"{asked} with {named}, which it does not announce")
    start = body.first_page - publication.start_page
    if start < 0 or not 1 <= body.num_pages <= len(publication.page_ids) - start:
        first = publication.start_page
        raise InvalidInput(
            f"{asked} at page positions [{body.first_page}, {body.first_page + body.num_pages}); it announces "
            f"[{first}, {first + len(publication.page_ids)})"
        )
    regions = [rank.regions[cell] for cell in cells]
    columns = ((one.base_address, one.page_stride, one.page_bytes) for one in regions)
    table = PageTable(*(np.array(column, dtype=np.int64) for column in zip(*columns, strict=True)))
    nbytes = int(table.page_bytes.sum()) * body.num_pages
    if nbytes > slot_bytes:
        raise InvalidInput(f"{asked} with {nbytes} bytes, and a slot has {slot_bytes}")
    pages = publication.page_ids[start : start + body.num_pages]
    return StageJob(publication, publication.generation, table, pages, nbytes)
