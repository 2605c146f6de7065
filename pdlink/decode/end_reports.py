"""Owns what log and listeners hear of receives that have ended, each once, and when. It ends none."""

from __future__ import annotations

import logging
import threading

from pdlink.control.loop import ControlLoop
from pdlink.decode.live import Live
from pdlink.events import Events
from pdlink.transfer.accounts import log_end

log = logging.getLogger("pdlink.decode")

REPORT_AFTER_S = 1e-3


class EndReports:
    """Those of one decode rank, `decode`. Under the lock of its worker, which `all_now` takes by itself."""

    def __init__(self, decode: str, loop: ControlLoop, lock: threading.RLock, events: Events) -> None:
        self._decode = decode
        self._loop = loop
        self._lock = lock
        self._events = events
        self._waiting: list[Live] = []

    def add(self, live: Live) -> None:
        """Tell of an end: of a success a moment later, so that whoever waits for it gets the GIL first."""
        if live.merge.failure:
            self._tell(live)
            return
        self._waiting.append(live)
        if len(self._waiting) == 1:
            self._loop.call_later(REPORT_AFTER_S, self.all_now)

    def all_now(self) -> None:
        """Tell of all that wait, as is due before the loop ends, which would do so."""
        with self._lock:
            ended, self._waiting = self._waiting, []
            for live in ended:
                try:
                    self._tell(live)
                except Exception:  # what the engine's own handlers of the log raise keeps nobody else from being told
                    log.exception("the end of transfer %s could not be told", live.receiver.transfer_id)

    def _tell(self, live: Live) -> None:
        merge = live.merge
        told: dict[str, object] = {
            "transfer_id": live.receiver.transfer_id,
            "attempt": live.receiver.attempt,
            "decode": self._decode,
            "prefill": live.instance.name,
            "peers": tuple(merge.num_bytes),
            "state": merge.state.value,
            "reason": merge.failure.reason.value if merge.failure else "",
            "failed_rank": merge.failure.worker_id if merge.failure else "",
            "num_bytes": sum(merge.num_bytes.values()),
            "num_pages": sum(merge.request.num_pages.values()),
            "elapsed_s": merge.elapsed_s,
            "ago_s": merge.ended_ago(self._loop.clock()),
            "plan_s": live.plan_s,
            **merge.phases,
            "trace_parent": live.trace_parent,
        }
        log_end(log, told, merge.failure)
        self._events.emit("transfer.end", **told)
