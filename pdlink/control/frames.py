"""Owns the control frames as values. Bytes become frames in `wire`; what a frame does is decided elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from pdlink.bootstrap.messages import ProtocolRange
from pdlink.layout.fingerprint import Fingerprint
from pdlink.layout.readers import ReaderSet
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.digests import Digests
from pdlink.transfer.failure import Failure


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
    field; `next_sequence` is the first Ready that the reader has not seen, and asks for it again.
    """

    protocol: ProtocolRange
    fingerprint_digest: bytes
    readers: ReaderSet
    incarnation: int
    spans: tuple[PageSpan, ...]
    next_sequence: int = 0
    backends: tuple[str, ...] = ()
    fingerprint: Fingerprint | None = None


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
    `digests` is None or uint64 [rows, n], its rows in the order of `cells_in_order(layers)`.
    """

    sequence: int
    group: str
    start_page: int
    page_ids: Int64Array
    layers: Mapping[str, tuple[int, ...]]
    generation: int
    last: bool = False
    aux: bytes | None = None
    digests: Digests | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ready):
            return NotImplemented
        plain = ("sequence", "group", "start_page", "layers", "generation", "last", "aux")
        same_digests = (self.digests is None) == (other.digests is None) and (
            self.digests is None or other.digests is None or bool(np.array_equal(self.digests, other.digests))
        )
        return (
            all(getattr(self, name) == getattr(other, name) for name in plain)
            and bool(np.array_equal(self.page_ids, other.page_ids))
            and same_digests
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

    A ticket is used once per attempt; the same Stage again asks for its answer again.
    """

    ticket: int
    sequence: int
    first_page: int
    num_pages: int
    layers: Mapping[str, tuple[int, ...]]


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
