"""Owns the digests of pages for readers that take parts of them: of what each of them takes of a page, packed.

They are made with those of whole pages where a reader has asked before the pages were published. For one that asks
later they are made then, and the whole pages are digested again, so that what was written in between is found all the
same. It sends nothing and knows no reader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pdlink.errors import LayoutError
from pdlink.layout.page_slices import held_runs
from pdlink.layout.parts import Part
from pdlink.layout.regions import Region
from pdlink.prefill.chunk import RankFacts
from pdlink.prefill.publication import WHOLE_PAGES, Parts, Publication
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.digests import DigestKind, DigestTable, Runs, cells_in_order, first_difference
from pdlink.transfer.failure import Failure, FailureReason

FIX = "look for an engine that writes published pages"
STEP_BYTES = 256 << 20
"""Digested later between two looks whether that is still wanted: about a tenth of a second."""


def taken_parts(rank: RankFacts, parts: Mapping[str, Part]) -> Parts:
    """What a reader says that it holds, checked. Raises `LayoutError` for components that the rank does not know, and
    for parts that its pages cannot be cut into."""
    for name, part in parts.items():
        if not len(_runs(rank, name, part)[0]):
            raise LayoutError(f"pages of {name!r} here hold {rank.parts[name]}, not {part}")
    return tuple(sorted(parts.items(), key=lambda one: one[0]))


def digest_parts(
    rank: RankFacts, layers: Mapping[str, tuple[int, ...]], page_ids: Int64Array, parts: Parts, whole: DigestTable
) -> DigestTable:
    """The digests of pages (int64 [n]) for a reader of `parts`; those of `whole` where it takes whole pages.

    Reads the pages, so it takes a while. Raises `BackendError` when a device cannot be read.
    """
    wanted, cells = dict(parts), cells_in_order(layers)
    rows = [row for row, (name, _) in enumerate(cells) if name in wanted]
    table = DigestTable(whole.kind, whole.values.copy())
    if rows and len(page_ids):
        regions = [rank.regions[cells[row]] for row in rows]
        runs = [_runs(rank, cells[row][0], wanted[cells[row][0]]) for row in rows]
        table.values[rows] = rank.digest(DigestKind(whole.kind), regions, page_ids, runs=runs)
    return table


def digest_later(
    rank: RankFacts, publication: Publication, every: Sequence[Parts], stop: Callable[[], bool] = lambda: False
) -> tuple[dict[Parts, DigestTable], Failure | None]:
    """The digests of pages that were published before, by the parts of `every`, and what is wrong where the pages are
    not what was published any more. None at all once `stop` says so. Raises `BackendError`."""
    whole, layers, ids = publication.digests[WHOLE_PAGES], publication.layers, publication.page_ids
    regions = [rank.regions[cell] for cell in cells_in_order(layers)]
    step = max(1, STEP_BYTES // sum(one.page_bytes for one in regions))
    found = {parts: np.zeros_like(whole.values) for parts in every}
    for first in range(0, len(ids), step):
        if stop():
            return {}, None
        some = slice(first, first + step)
        vouched = whole.part(range(len(regions)), some)
        for parts, values in found.items():
            values[:, some] = digest_parts(rank, layers, ids[some], parts, vouched).values
        now = rank.digest(DigestKind(whole.kind), regions, ids[some])  # after what it is to vouch for
        wrong = first_difference(now, vouched.values)
        if wrong is not None:
            digests = int(now[wrong]), int(vouched.values[wrong])
            return {}, _changed(rank, whole.kind, regions[wrong[0]], int(ids[some][wrong[1]]), digests)
    return {parts: DigestTable(whole.kind, values) for parts, values in found.items()}, None


def _changed(rank: RankFacts, kind: str, region: Region, page: int, digests: tuple[int, int]) -> Failure:
    text = (
        f"{region.component!r} layer {region.layer}, page {page} is not what was published any more, before a reader "
        f"of parts of it has begun: {kind} {digests[0]:016x} now, {digests[1]:016x} then"
    )
    return Failure(FailureReason.DIGEST, text, rank.worker_id, fix=FIX)


def _runs(rank: RankFacts, name: str, wanted: Part) -> Runs:
    return held_runs(rank.layout.component(name), rank.parts[name], wanted)
