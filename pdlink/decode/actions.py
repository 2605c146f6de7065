"""Owns what a merge tells its worker to do, and the plan that it decides on. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from pdlink.control.frames import Body
from pdlink.transfer.descriptors import Int64Array, PullBatch
from pdlink.transfer.digests import DigestTable
from pdlink.transfer.packing import Landing
from pdlink.transfer.planner import PullPlanner


@dataclass(frozen=True, slots=True)
class Send:
    worker_id: str
    body: Body


@dataclass(frozen=True, slots=True)
class Resubscribe:
    """Send a Subscribe that asks for Ready frames from `next_sequence` on."""

    worker_id: str
    next_sequence: int


@dataclass(frozen=True, slots=True, eq=False)
class Pull:
    """Move `batch`; afterwards compare `digests` (of `rows` and `pages`) with the destination's when there are any.

    `cells` are the (component, layer) of `rows`; `pages` are own pages, for page positions from `first_page` on of what
    the Ready of `sequence` announced in `generation`. `staged_pieces`: so many pieces of it the owner stages unasked.
    `landing` says how packed pages become own ones, where they are not whole pages.
    """

    worker_id: str
    ticket: int
    batch: PullBatch
    group: str
    rows: Int64Array
    pages: Int64Array
    digests: DigestTable | None
    cells: tuple[tuple[str, int], ...]
    sequence: int
    generation: int
    first_page: int
    staged_pieces: int = 0
    landing: Landing | None = None


@dataclass(frozen=True, slots=True)
class StopPulls:
    """Post nothing more of this request to these owners, and make what was posted quiet."""

    worker_ids: tuple[str, ...]


Action: TypeAlias = Send | Resubscribe | Pull | StopPulls


@dataclass(frozen=True)
class MergePlan:
    """Whom a request concerns: every rank of the dp group, the pull planner over them, and the elected aux owner."""

    planner: PullPlanner
    incarnations: Mapping[str, int]
    aux_owner: str
