"""Owns the digests of pages for readers that take parts of them: of what each of them takes of a page, packed.

They are made with those of whole pages where a reader has asked before the pages were published. For one that asks
later they are made then, and the whole pages are digested again, so that what was written in between is found all the
same. It sends nothing and knows no reader.
"""

from __future__ import annotations

from collections.abc import Mapping

from pdlink.errors import LayoutError
from pdlink.layout.page_slices import held_runs
from pdlink.layout.parts import Part
from pdlink.prefill.chunk import RankFacts
from pdlink.prefill.publication import WHOLE_PAGES, Parts, Publication
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.digests import DigestKind, DigestTable, Runs, cells_in_order, first_difference
from pdlink.transfer.failure import Failure, FailureReason

FIX = "look for an engine that writes published pages"


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
    rank: RankFacts, publication: Publication, every: list[Parts]
) -> tuple[dict[Parts, DigestTable], Failure | None]:
    """The digests of pages that were published before, by the parts of `every`, and what is wrong where the pages are
    not what was published any more. Raises `BackendError`."""
    whole, layers, ids = publication.digests[WHOLE_PAGES], publication.layers, publication.page_ids
    made = {parts: digest_parts(rank, layers, ids, parts, whole) for parts in every}
    cells = cells_in_order(layers)
    now = rank.digest(DigestKind(whole.kind), [rank.regions[cell] for cell in cells], ids)  # after what is vouched for
    wrong = first_difference(now, whole.values)
    if wrong is None:
        return made, None
    (component, layer), page = cells[wrong[0]], int(ids[wrong[1]])
    text = (
        f"{component!r} layer {layer}, page {page} is not what was published any more, before a reader of parts of it "
        f"has begun: {whole.kind} {int(now[wrong]):016x} now, {int(whole.values[wrong]):016x} then"
    )
    return made, Failure(FailureReason.DIGEST, text, rank.worker_id, fix=FIX)


def _runs(rank: RankFacts, name: str, wanted: Part) -> Runs:
    return held_runs(rank.layout.component(name), rank.parts[name], wanted)
