"""Owns the control frames as values. Bytes become frames in `wire`; what a frame does is decided elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from pdlink.bootstrap.messages import ProtocolRange
from pdlink.layout.fingerprint import Fingerprint
from pdlink.layout.parts import Part
from pdlink.layout.readers import ReaderSet
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.digests import DigestTable
from pdlink.transfer.failure import Failure

MAX_PUBLICATIONS = 1 << 16
"""Of one request on one rank: their numbers are in its release, and every one is remembered until it ends."""


@dataclass(frozen=True, slots=True)
class PageSpan:
    """Page positions [first_page, first_page + num_pages) of a request in one page group."""

    group: str
    first_page: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Decode -> prefill: I am going to pull this request from the worker of this incarnation.

    `fingerprint` is filled in only when decode already knows that the layouts differ, so that prefill can name the
    field; `next_sequence` is the first Ready that the reader has not seen, and asks for it again. `stage_bytes` is the
    size of the pieces into which it will cut staged pulls (0: nothing is to be staged unasked), `stage_pieces` how many
    of them may be staged unasked per publication. `trace_parent` is the W3C trace context of the engine's request,
    where it has one. `parts` is what the reader holds of components of which it pulls no whole pages from this worker.
    What is staged, and `parts`, stay as they are while the attempt lasts.
    """

    protocol: ProtocolRange
    fingerprint_digest: bytes
    readers: ReaderSet
    incarnation: int
    spans: tuple[PageSpan, ...]
    next_sequence: int = 0
    backends: tuple[str, ...] = ()
    fingerprint: Fingerprint | None = None
    stage_bytes: int = 0
    stage_pieces: int = 0
    trace_parent: str = ""
    parts: Mapping[str, Part] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Subscribed:
    incarnation: int
    next_sequence: int
    is_open: bool


@dataclass(frozen=True, slots=True)
class Refused:
    cause: Failure


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """Prefill -> decode: pages of layers that are final, in the page positions from `start_page` on.

    `page_ids` is int64 [n] of the prefill rank's own pool; `aux` is None except with `last` of the elected owner;
    `digests` has a row for each of `cells_in_order(layers)`, and a column for each page: of packed pages for components
    in the `parts` of the Subscribe. Those of a kind that is not known here may be missing from it.
    `staged_pieces` says how many of the first pieces are staged unasked (see `transfer/ahead.py`).
    """

    sequence: int
    group: str
    start_page: int
    page_ids: Int64Array
    layers: Mapping[str, tuple[int, ...]]
    generation: int
    last: bool = False
    aux: bytes | None = None
    digests: DigestTable | None = None
    staged_pieces: int = 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ready):
            return NotImplemented
        plain = ("sequence", "group", "start_page", "layers", "generation", "last", "aux", "digests", "staged_pieces")
        return all(getattr(self, name) == getattr(other, name) for name in plain) and bool(
            np.array_equal(self.page_ids, other.page_ids)
        )


@dataclass(frozen=True, slots=True)
class Release:
    """Decode -> prefill: everything landed. `pulled` maps the sequence of each Ready to its generation."""

    readers: ReaderSet
    pulled: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Prefill -> decode: whether all that was pulled was still published; the cause when not."""

    unchanged: bool
    cause: Failure | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    cause: Failure
    readers: ReaderSet


@dataclass(frozen=True, slots=True)
class AbortAck:
    pass


@dataclass(frozen=True, slots=True)
class Failed:
    cause: Failure


@dataclass(frozen=True, slots=True)
class Stage:
    """Decode -> prefill: pack page positions [first_page, first_page + num_pages) of the Ready of `sequence`.

    A ticket is used once per attempt; the same Stage again asks for its answer again. Of components in `parts` only
    what the reader holds of them is packed (see `layout/page_slices.py`); of others, whole pages.
    """

    ticket: int
    sequence: int
    first_page: int
    num_pages: int
    layers: Mapping[str, tuple[int, ...]]
    parts: Mapping[str, Part] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Staged:
    """Prefill -> decode: packed in the order of `cells_in_order(layers)`, and within a cell of the page positions.

    `offset` is that of the slot in the owner's staging area; `generation` that of the publication, looked at when the
    packing was over.
    """

    ticket: int
    slot: int
    offset: int
    nbytes: int
    stamp: int
    generation: int


@dataclass(frozen=True, slots=True)
class Credit:
    """Decode -> prefill: these slots may be used again. `stamps` are those of the Staged frames that gave them."""

    slots: tuple[int, ...]
    stamps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ping:
    nonce: int


@dataclass(frozen=True, slots=True)
class Pong:
    nonce: int
    incarnation: int


Body: TypeAlias = (
    Subscribe
    | Subscribed
    | Refused
    | Ready
    | Release
    | Verdict
    | Abort
    | AbortAck
    | Failed
    | Stage
    | Staged
    | Credit
    | Ping
    | Pong
)


@dataclass(frozen=True, slots=True)
class Frame:
    """One message about one attempt of one request. `attempt` is the receiver's nonce."""

    transfer_id: str
    attempt: int
    body: Body
