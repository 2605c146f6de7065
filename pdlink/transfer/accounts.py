"""Owns the one line of the log that a finished or failed request gets, on either side. Nothing is logged per page."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import cast

from pdlink.transfer.failure import Failure


def log_end(log: logging.Logger, told: Mapping[str, object], failure: Failure | None) -> None:
    """Write how a request ended: a warning where it failed. `told` are its facts, which the record carries as they are
    (`record.pdlink`): `transfer_id`, `state`, `num_bytes`, `elapsed_s` and whatever else is known of it. `peers` are
    the ranks that decode pulled from; without them the bytes are those that prefill published for `decode`."""
    nbytes, elapsed_s = cast(int, told.get("num_bytes", 0)), cast(float, told["elapsed_s"])
    peers = cast(Sequence[str], told.get("peers", ()))
    gb_per_s = nbytes / elapsed_s / 1e9 if elapsed_s > 0 else 0.0
    facts = {"pdlink": {**told, "gb_per_s": round(gb_per_s, 4), "text": str(failure) if failure else ""}}
    if failure:
        log.warning("transfer %s %s: %s", told["transfer_id"], told["state"], failure, extra=facts)
        return
    whose = f"from {len(peers)} ranks" if peers else f"published for {told.get('decode')}"
    moved = f": {nbytes} bytes {whose} in {elapsed_s * 1e3:.1f} ms, {gb_per_s:.2f} GB/s" if nbytes else ""
    log.info("transfer %s %s%s", told["transfer_id"], told["state"], moved, extra=facts)
