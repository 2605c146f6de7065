"""Owns what one receive says to a prefill rank when it subscribes: who reads which pages, what may be staged unasked.

Not thread-safe: the decode worker calls it under its lock.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pdlink.bootstrap.messages import Side
from pdlink.control.frames import Subscribe
from pdlink.decode.live import Live
from pdlink.transfer.ahead import Ahead
from pdlink.transfer.descriptors import Int64Array


def subscription(
    live: Live, side: Side, backends: Iterable[str], incarnation: int, next_sequence: int, worker_id: str = ""
) -> Subscribe:
    """The frame's body for rank `worker_id` of the receive's link, or, without one, for a rank that does not fit."""
    if worker_id not in live.ahead:
        live.ahead[worker_id] = _stage_ahead(live, worker_id)
    ahead = live.ahead[worker_id] or Ahead(0, 0)
    planner = live.link.plan(live.merge.request.dp).planner if live.link and worker_id else None
    return Subscribe(
        side.protocol,
        side.fingerprint.digest,
        live.merge.request.readers,
        incarnation,
        live.merge.request.spans(),
        next_sequence,
        tuple(backends),
        None,
        ahead.piece_bytes,
        ahead.num_pieces,
        live.trace_parent,
        planner.parts_from(worker_id) if planner else {},
    )


def _stage_ahead(live: Live, worker_id: str) -> Ahead | None:
    """What an owner may stage unasked, judged by the page group of which it moves most."""
    if live.link is None or not (link := live.link.ranks.get(worker_id)) or not link.puller.is_idle:
        return None
    planner, request = live.link.plan(live.merge.request.dp).planner, live.merge.request
    if not planner.pulls_all_of(worker_id):
        return None  # an owner stages unasked of all that it publishes
    found: list[tuple[int, Int64Array, int]] = [(0, np.zeros(0, dtype=np.int64), 0)]
    for name, group in planner.groups.items():
        page_bytes = group.row_bytes[planner.rows(worker_id, name)]
        num_pages = request.num_pages.get(name, 0)
        found.append((int(page_bytes.sum()) * num_pages, page_bytes, num_pages))
    _, page_bytes, num_pages = max(found, key=lambda one: one[0])
    return link.puller.ways.ahead(page_bytes, num_pages)
