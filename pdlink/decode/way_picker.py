"""Owns the way of each pull from one prefill rank: what staging there is, what a link costs, and the choice, told to
whoever listens. The rule itself is in `transfer/ways.py`, the measuring in `calibration`.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from pdlink.backends.base import Backend
from pdlink.backends.copiers import Copier, open_copier
from pdlink.backends.staging import Arena
from pdlink.bootstrap.messages import RankInfo
from pdlink.config import Settings
from pdlink.decode.actions import Pull
from pdlink.decode.calibration import measure, num_rows
from pdlink.decode.stage_inbox import StageInbox
from pdlink.decode.staged_pull import Wire
from pdlink.decode.staging_link import StagingLink
from pdlink.errors import PlanError, RegionError
from pdlink.events import Events
from pdlink.layout.regions import MemoryKind
from pdlink.transfer.ahead import Ahead
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.failure import Failure
from pdlink.transfer.ways import DEVICE_COPY, HOST_COPY, CopyCost, Way, WayChoice, WireCost, Workload, choose_way

log = logging.getLogger("pdlink.decode")

ALIKE = 2
"""A request of fewer than the bytes of the newest pull by this factor may move by another way."""
LEAST_DESCRIPTORS = 16
"""Fewer are never worth a measurement, let alone packing."""


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
        self._copier: Copier | None = None
        self._warned = ""
        self._last_bytes = 0
        self._measured: dict[tuple[str, int], WireCost] = {}
        """(backend, bits of the row size) -> what was measured."""

    def copier(self) -> Copier:
        """What takes pages out of the slots; made when the first ones come. Raises `BackendUnavailable`."""
        assert self.staging is not None
        if self._copier is None:
            area = self.staging.arena.area
            self._copier = open_copier(area.memory, area.device)
        return self._copier

    def close(self) -> None:
        """Let go of the copier. By the thread that pulls, at its end."""
        if self._copier:
            self._copier.close()

    def may_stage(self, pull: Pull, backend: Backend) -> bool:
        """Whether `pull` may take the staged way over `backend`, and so wait for its owner."""
        if self._why_not(pull, backend):
            return False
        if self._must_stage(backend):
            return True
        if self._settings.way == "direct":
            return False
        return self._settings.way == "staged" or not backend.capabilities.gathers

    def calibrate(self, pull: Pull, backend: Backend, wire: Wire) -> Failure | None:
        """Measure the link for rows like those of `pull`, once, where that could decide. Returns what went wrong.

        Without a free slot it is left to a later pull.
        """
        place = (backend.name, _row_bytes(pull).bit_length())
        staging = self.staging
        undecided = self._settings.way == "auto" and not self._must_stage(backend) and self.may_stage(pull, backend)
        if staging is None or not undecided or place in self._measured:
            return None
        if not num_rows(staging, _row_bytes(pull)) or (slot := staging.arena.slots.try_take()) is None:
            return None
        try:
            found = measure(staging, wire, self._rank.worker_id, slot, _row_bytes(pull))
        finally:
            staging.arena.slots.give(slot)
        if isinstance(found, Failure):
            return found
        self._measured[place] = found
        log.info(
            "link to %s over %s: %.1f us a descriptor of about %d bytes, %.2f GB/s",
            self._rank.worker_id,
            backend.name,
            found.per_descriptor_s * 1e6,
            _row_bytes(pull),
            found.bytes_per_s / 1e9,
        )
        return None

    def pick(self, pull: Pull, backend: Backend) -> WayChoice:
        """The way for one pull over `backend`. Raises `RegionError` where only the staged one could be, and cannot."""
        must = self._must_stage(backend)
        cost = self._cost(pull, backend)
        obstacle = self._why_not(pull, backend)
        load = Workload(pull.batch.nbytes, pull.batch.num_descriptors, None if obstacle else self._num_pieces(pull))
        self._last_bytes = load.nbytes
        choice = choose_way(Way.STAGED if must else self._settings.way, load, cost, obstacle, self._copies())
        if must and choice.way is not Way.STAGED:
            why = obstacle or f"a page does not fit a staging slot ({load.nbytes} bytes; PDLINK_STAGING_SLOT_BYTES)"
            whose = f"pages of {self._rank.worker_id}"
            raise RegionError(f"{whose} cannot be pulled over {backend.name}: {must}, and {why}")
        choice = self.last = replace(choice, reason=must) if must else choice
        if log.isEnabledFor(logging.DEBUG):
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

    def ahead(self, page_bytes: Int64Array, num_pages: int) -> Ahead | None:
        """What the owner may stage unasked for a request of rows (int64 [n] of page bytes) x `num_pages`.

        Nothing where the newest pull was not staged, or moved much more than this one can. Any thread may ask.
        """
        if self.staging is None or self.last is None or self.last.way is not Way.STAGED:
            return None
        nbytes = int(page_bytes.sum()) * num_pages
        if self._settings.way == "auto" and ALIKE * nbytes < self._last_bytes:
            return None
        return self.staging.ahead(page_bytes, num_pages)

    def explain(self) -> str:
        """How the newest pull moved and why; empty before the first."""
        return self.last.explain() if self.last else ""

    def _why_not(self, pull: Pull, backend: Backend) -> str:
        """What keeps `pull` from being staged over `backend`, or nothing."""
        staging = self.staging
        if staging is None:
            return self._obstacle
        if backend.name not in staging.arena.area.backends:
            return f"backend {backend.name} does not reach the staging slots of this side"
        if backend.name not in staging.source.backends:
            return f"backend {backend.name} does not reach the staging slots of {self._rank.worker_id}"
        is_free = self._settings.way == "auto" and not self._must_stage(backend)
        if is_free and pull.batch.num_descriptors < LEAST_DESCRIPTORS:
            return f"{pull.batch.num_descriptors} descriptors are too few to pack"
        return ""

    def _must_stage(self, backend: Backend) -> str:
        """Why pages cannot be read or written over `backend` where they lie, or nothing."""
        if backend.capabilities.staged_only:
            return "pages of this side are not registered with it"
        if backend.name in self._rank.staged_only:
            return f"pages of {self._rank.worker_id} are not registered with it"
        return ""

    def _cost(self, pull: Pull, backend: Backend) -> WireCost:
        facts = backend.capabilities
        said = WireCost(facts.cost_per_descriptor_s, facts.bytes_per_s, facts.gathers)
        return self._measured.get((backend.name, _row_bytes(pull).bit_length()), said)

    def _copies(self) -> CopyCost:
        on_device = self.staging is not None and self.staging.arena.area.memory is MemoryKind.CUDA
        return DEVICE_COPY if on_device else HOST_COPY

    def _num_pieces(self, pull: Pull) -> int | None:
        assert self.staging is not None
        try:
            return len(self.staging.cut(pull).pieces)
        except PlanError:
            return None


def _row_bytes(pull: Pull) -> int:
    """What a descriptor of the direct way moves, on average."""
    return max(1, pull.batch.nbytes // max(1, pull.batch.num_descriptors))
