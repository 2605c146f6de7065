"""Owns the way of each pull from one prefill rank: what staging there is, what a link costs, and the choice, told to
whoever listens. The rule itself is in `transfer/ways.py`, and nothing is moved here.
"""

from __future__ import annotations

import logging

from pdlink.backends.base import Backend
from pdlink.backends.staging import Arena
from pdlink.bootstrap.messages import RankInfo
from pdlink.config import Settings
from pdlink.decode.actions import Pull
from pdlink.decode.stage_inbox import StageInbox
from pdlink.decode.staged_pull import StagingLink
from pdlink.errors import PlanError
from pdlink.events import Events
from pdlink.transfer.ways import Way, WayChoice, WireCost, Workload, choose_way

log = logging.getLogger("pdlink.decode")


class WayPicker:
    """One for each puller, used by the thread that pulls. `last` is the choice for the newest pull."""

    def __init__(self, rank: RankInfo, settings: Settings, arena: Arena | None, events: Events) -> None:
        self.inbox = StageInbox()
        self.staging: StagingLink | None = None
        self.last: WayChoice | None = None
        self._rank = rank
        self._settings = settings
        self._events = events
        self._obstacle = ""
        if arena is None:
            self._obstacle = "this side has no staging slots (PDLINK_STAGING_SLOTS)"
        elif rank.staging is None:
            self._obstacle = f"{rank.worker_id} offers no staging slots (PDLINK_STAGING_SLOTS, PDLINK_WAY there)"
        else:
            self.staging = StagingLink(arena, rank.staging, self.inbox, settings)
        self._warned = ""

    def may_stage(self, backend: Backend) -> bool:
        """Whether a pull over `backend` may take the staged way, and so wait for its owner."""
        if self.staging is None or self._settings.way == "direct":
            return False
        return self._settings.way == "staged" or not backend.capabilities.gathers

    def pick(self, pull: Pull, backend: Backend) -> WayChoice:
        """The way for one pull over `backend`."""
        facts = backend.capabilities
        cost = WireCost(facts.cost_per_descriptor_s, facts.bytes_per_s, facts.gathers)
        obstacle = self._obstacle
        if self.staging and backend.name not in self.staging.arena.backends:
            obstacle = f"backend {backend.name} does not move host memory"
        load = Workload(pull.batch.nbytes, pull.batch.num_descriptors, None if obstacle else self._num_pieces(pull))
        choice = self.last = choose_way(self._settings.way, load, cost, obstacle)
        log.debug("pull from %s over %s %s", self._rank.worker_id, backend.name, choice.explain())
        if self._settings.way == "staged" and choice.way is not Way.STAGED and choice.reason != self._warned:
            self._warned = choice.reason
            log.warning("pulls from %s are not staged: %s", self._rank.worker_id, choice.reason)
        self._events.emit(
            "pull.way",
            worker_id=self._rank.worker_id,
            backend=backend.name,
            way=choice.way.value,
            reason=choice.reason,
            direct_s=choice.direct_s,
            staged_s=choice.staged_s,
            num_bytes=load.nbytes,
            num_descriptors=load.num_descriptors,
        )
        return choice

    def explain(self) -> str:
        """How the newest pull moved and why; empty before the first."""
        return self.last.explain() if self.last else ""

    def _num_pieces(self, pull: Pull) -> int | None:
        assert self.staging is not None
        try:
            return len(self.staging.pieces(pull))
        except PlanError:
            return None
