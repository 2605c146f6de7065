"""Owns what staged pulls from one owner have in common: both sides' slots, where answers come in, and how a pull is cut
into pieces. It asks for nothing and moves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pdlink.backends.staging import Arena
from pdlink.config import Settings
from pdlink.decode.actions import Pull
from pdlink.decode.stage_inbox import StageInbox
from pdlink.layout.regions import MemoryKind
from pdlink.layout.staging import StagingArea
from pdlink.transfer.ahead import Ahead, cut_ahead
from pdlink.transfer.descriptors import Int64Array, LayerTable, PullBatch
from pdlink.transfer.digests import by_component
from pdlink.transfer.kept import Kept
from pdlink.transfer.packing import Landing, PageTable, Piece, cut, one_range

MAX_KEPT, MAX_TARGETS = 256, 64
"""Cuts, their tables, and ranges from slot to slot, that are remembered: requests of a link are much alike."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How a pull is cut and how far ahead it asks.

    `depth` is how many slots it holds at most, on either side; `num_pieces` into about how many pieces it is cut where
    they fit a slot, none of fewer than `least_bytes`. `num_posted` is how many of its pieces are on the wire at most;
    while they are, `nap_s` passes between two looks.
    """

    depth: int
    num_pieces: int
    least_bytes: int
    num_posted: int = 2
    nap_s: float = 50e-6

    def piece_bytes(self, page_bytes: Int64Array, num_pages: int, slot_bytes: int) -> int:
        """What a piece of rows (int64 [n] of page bytes) x `num_pages` may have, in slots of `slot_bytes`."""
        nbytes, largest = int(page_bytes.sum()) * num_pages, int(page_bytes.max())
        num_pieces = max(self.num_pieces, -(-nbytes // slot_bytes))
        # The last one about half as long as the others: when it has landed, nothing is left to do but to unpack it.
        aim = max(self.least_bytes, -(-2 * nbytes // (2 * num_pieces - 1)))
        if aim > largest * num_pages:  # of whole rows, so that the nearest number of them counts
            aim += largest * num_pages // 2
        return min(max(aim, largest), slot_bytes)


PACES = {
    # One is packed and one is unpacked, and on the wire the next one waits when one ends.
    MemoryKind.HOST: Pace(4, 4, 1 << 20, 4),
    # What a piece costs beside its bytes takes as long as some 30 MB between two devices. Their copies follow each
    # other without this process: whatever is packed waits there, all of it over within milliseconds.
    MemoryKind.CUDA: Pace(4, 4, 32 << 20, 4, 10e-6),
}


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """The pieces of a pull. `order` holds positions in its cells as both sides pack them, by component, then by layer;
    `layers` what each piece has of them, as a Stage names it.
    """

    order: Int64Array
    pieces: tuple[Piece, ...]
    layers: tuple[Mapping[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class StagingLink:
    """What staged pulls from one owner need: both areas, and where its answers come in. Used by one thread."""

    arena: Arena
    source: StagingArea
    inbox: StageInbox
    settings: Settings
    _cuts: Kept[tuple[tuple[tuple[str, int], ...], int, Ahead | None, Landing | None], Cut] = field(
        default_factory=lambda: Kept(MAX_KEPT)
    )
    _targets: Kept[tuple[Cut, Landing | LayerTable], tuple[tuple[PageTable, ...], ...]] = field(
        default_factory=lambda: Kept(MAX_TARGETS)
    )
    _ranges: Kept[tuple[int, int, int], PullBatch] = field(default_factory=lambda: Kept(MAX_KEPT))

    @property
    def slot_bytes(self) -> int:
        """What a piece may have: it must fit a slot on both sides."""
        return min(self.arena.area.slot_bytes, self.source.slot_bytes)

    @property
    def pace(self) -> Pace:
        return PACES[self.arena.area.memory]

    def cut(self, pull: Pull, ahead: Ahead | None = None) -> Cut:
        """How `pull` is cut; where the first pieces are staged unasked, as `ahead` says. Raises `PlanError` where a
        page does not fit a slot."""
        key = (pull.cells, len(pull.pages), ahead, pull.landing)
        return self._cuts.of(key, lambda: self._make_cut(pull, ahead))

    def targets(self, pull: Pull, cut: Cut) -> tuple[tuple[PageTable, ...], ...]:
        """Where the pages of each piece of `cut`, which is of `pull`, go, by turn."""
        known: Landing | LayerTable = pull.landing or pull.batch.moves[0].layers
        return self._targets.of((cut, known), lambda: _targets(cut, known))

    def ahead(self, page_bytes: Int64Array, num_pages: int) -> Ahead | None:
        """What the owner may stage unasked for pulls of rows (int64 [n] of page bytes) x up to `num_pages`."""
        if not len(page_bytes) or not num_pages:
            return None
        depth = min(self.pace.depth, self.arena.slots.num_slots)
        return Ahead(self.pace.piece_bytes(page_bytes, num_pages, self.slot_bytes), depth)

    def from_slot(self, worker_id: str, source_slot: int, slot: int, nbytes: int) -> PullBatch:
        """The pull of the first `nbytes` of the owner's slot into an own one."""
        return self._ranges.of(
            (source_slot, slot, nbytes),
            lambda: one_range(worker_id, self.source, source_slot, self.arena.area, slot, nbytes),
        )

    def _make_cut(self, pull: Pull, ahead: Ahead | None) -> Cut:
        order = np.array(sorted(range(len(pull.cells)), key=pull.cells.__getitem__), dtype=np.int64)
        table = pull.landing.tables[0] if pull.landing else None
        page_bytes = (table.row_bytes if table else pull.batch.moves[0].layers.page_bytes)[order]
        num_pages = len(pull.pages)
        if ahead:
            pieces = cut_ahead(page_bytes, num_pages, ahead)
        else:
            pieces = cut(page_bytes, num_pages, self.pace.piece_bytes(page_bytes, num_pages, self.slot_bytes))
        cells = [pull.cells[row] for row in order.tolist()]
        return Cut(order, tuple(pieces), tuple(by_component(cells[piece.rows]) for piece in pieces))


def _targets(cut: Cut, known: Landing | LayerTable) -> tuple[tuple[PageTable, ...], ...]:
    tables: tuple[PageTable, ...]
    if isinstance(known, LayerTable):
        tables = (PageTable(known.destination_base, known.destination_stride, known.page_bytes),)
    else:
        tables = known.tables
    turns = [table.take(cut.order) for table in tables]
    return tuple(tuple(table.take(piece.rows) for table in turns) for piece in cut.pieces)
