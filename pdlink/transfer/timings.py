"""Owns where the time of one pull went, as seconds per phase. It reads no clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PullTimings:
    """Seconds that the thread of a pull spent per phase. Written by that thread only.

    `prep_s`: checking ranges and making what the library wants. `post_s`: in the calls of the library that start reads;
    where these copy (nixl over cma), that is the copy. `pack_s`: waiting for the owner to pack a piece. `wire_s`:
    waiting for bytes, or moving them in `poll`. `unpack_s`: from staging slots to pages. `num_posted` counts batches
    that were handed to the backend.

    Of a staged pull, whose pieces overlap: `head_s` until the first read was posted, `tail_s` after the last one had
    landed. `verify_s`: comparing digests, after the pull.
    """

    prep_s: float = 0.0
    post_s: float = 0.0
    pack_s: float = 0.0
    wire_s: float = 0.0
    unpack_s: float = 0.0
    head_s: float = 0.0
    tail_s: float = 0.0
    verify_s: float = 0.0
    num_posted: int = 0
