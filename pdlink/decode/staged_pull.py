"""Owns one pull by the staged way, piece by piece: own slot, then the owner's, one large range, the pages out of it.

It runs on the thread of the owner's puller. Several pieces are under way at once, each at a stage of its own, so that
the owner packs one while another is on the wire and a third is unpacked. Slots are taken in one order, own ones first:
a pull asks for nothing before it holds an own slot, keeps one while a piece is still to come, and never waits for
another. What it has asked for thus always has a slot to come to, and no two requests can wait for each other.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from pdlink.backends.base import PullHandle, PullStatus
from pdlink.backends.copiers import Copier, Copying, Prepared
from pdlink.backends.naps import sharpen
from pdlink.control.frames import Credit, Stage, Staged
from pdlink.decode import failures
from pdlink.decode.actions import Pull
from pdlink.decode.owner_slots import OwnerSlots
from pdlink.decode.stage_inbox import Send
from pdlink.decode.staging_link import StagingLink
from pdlink.errors import BackendError
from pdlink.transfer.ahead import Ahead, ahead_ticket, is_ahead
from pdlink.transfer.descriptors import PageRuns, PullBatch
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.packing import Piece, unpack, unpack_runs
from pdlink.transfer.timings import PullTimings

log = logging.getLogger("pdlink.decode")

LOOK_S = 0.02
SOON_S = 0.2e-3
"""How long an answer is waited for before something is made ready for it, while nothing is on the wire. The thread that
takes answers in gets the interpreter only while this one waits, and nothing moves before the first has come."""
COPY_NAP_S = 20e-6
ANSWER_SLACK_S = 1.0
"""The owner's own deadline comes first: it can say what it waited for."""

Outcome: TypeAlias = Failure | None


class Wire(Protocol):
    """The puller's backend, for batches of this pull."""

    def start(self, batch: PullBatch) -> PullHandle: ...

    def look(self, handle: PullHandle) -> PullStatus | Failure:
        """Advance a pull: PENDING, DONE, or what went wrong. Unless PENDING it is quiet then, also when this raises."""

    def nap(self, nap_s: float) -> None:
        """Let so much time pass, where looking again at once could not help."""

    def finish(self, handle: PullHandle) -> Outcome:
        """Wait for the end of a pull; it is quiet then, also when this raises."""

    def drop(self, handle: PullHandle) -> None:
        """Make a pull quiet without waiting for its bytes."""


@dataclass(slots=True, eq=False)
class _Asked:
    """A piece that the owner was asked for.

    `answer`: it is packed. `slot`: the own one that it comes to. `handle`: it is on the wire. `landed`: it is in the
    own slot, and the owner's was given back. `unpacking`: its way to its pages is made ready. `copying`: it is on it.
    """

    number: int
    piece: Piece
    ticket: int
    since: float
    said: float
    body: Stage
    answer: Staged | None = None
    slot: int | None = None
    handle: PullHandle | None = None
    landed: bool = False
    unpacking: Prepared | None = None
    copying: Copying | None = None


class StagedPull:
    """One pull. `run` once; every slot is given back when it returns or raises."""

    def __init__(
        self,
        link: StagingLink,
        pull: Pull,
        key: tuple[str, int],
        tickets: Iterator[int],
        send: Send,
        stop: Callable[[], bool],
        wire: Wire,
        timings: PullTimings,
        copier: Copier,
        ahead: Ahead | None = None,
    ) -> None:
        """`ahead` is what the owner stages unasked; its answers are expected already."""
        self.owed: Credit | None = None
        """After `run`: what gives back the owner's last slots. Its caller sends it, once it has told of the end."""
        self._link = link
        self._pull = pull
        self._owner = OwnerSlots(link.inbox, key, tickets, send)
        self._stop = stop
        self._wire = wire
        self._timings = timings
        self._copier = copier
        self._slots = link.arena.slots
        self._cut = link.cut(pull)
        self._num_ahead = 0
        if ahead and len(link.cut(pull, ahead).pieces) >= ahead.num_pieces:
            self._cut, self._num_ahead = link.cut(pull, ahead), ahead.num_pieces
        self._todo = deque(range(len(self._cut.pieces)))
        self._asked: list[_Asked] = []
        """In the order in which they were asked for."""
        self._spare: list[int] = []
        """Own slots that are held for pieces to come."""
        self._targets = link.targets(pull, self._cut)
        self._began = self._landed_at = time.perf_counter()
        self._runs: dict[tuple[int, int], list[PageRuns]] = {}
        """By their first and last page positions: those that pieces have, by turn, which are mostly the same."""

    def run(self) -> Outcome:
        """Move every piece. Returns what went wrong, once nothing of it can land any more."""
        sharpen()
        try:
            self._take_over()
            while self._todo or self._asked:
                landed = self._look()
                if isinstance(landed, Failure):
                    return landed
                # Posted and asked for first: what is on the wire or packed needs nobody here while this thread unpacks.
                before = self._num_on_the_wire
                failure = self._stopped() or self._hear() or self._post()
                if failure:
                    return failure
                asked = self._ask_ahead()
                if isinstance(asked, Failure):
                    return asked
                said = self._owner.say(bool(self._todo) or any(one.answer is None for one in self._asked))
                moved, cleared = self._unpack(), self._clear()
                posted = self._num_on_the_wire > before
                # Not right after a post: what is packed too by now goes on the wire first.
                prepared = not posted and bool(self._num_on_the_wire) and self._prepare()
                if not (landed or posted or said or moved or cleared or prepared):
                    self._wait()
            self.owed = self._owner.owed()
            self._timings.tail_s = time.perf_counter() - self._landed_at
            return None
        finally:
            self._let_go()

    # --- asking -------------------------------------------------------------------------------------

    def _take_over(self) -> None:
        """Begin with what the owner stages unasked, where there is an own slot for it now; else that goes back at once,
        because nothing of the owner may be held while own slots are waited for."""
        tickets = [ahead_ticket(self._pull.sequence, number) for number in range(self._num_ahead)]
        slot = self._slots.try_take() if tickets else None
        if slot is None:
            self._owner.give_back(tickets)
            return
        self._spare.append(slot)
        for ticket in tickets:
            self._add(self._todo.popleft(), ticket)

    def _ask_ahead(self) -> bool | Failure:
        """Ask for one more piece where that may be; whether it was. The owner begins with it while the next one is
        made ready here."""
        if not self._todo:
            return False
        if not self._asked:
            if failure := self._take_first():
                return failure
        elif self._slots.is_wanted or sum(not one.landed for one in self._asked) >= self._link.pace.depth:
            return False
        self._ask(self._todo.popleft())
        return True

    def _take_first(self) -> Outcome:
        """Take the own slot without which nothing is asked for. Whoever waits for one already comes first."""
        if self._spare and self._slots.is_wanted:
            self._give_spare()
        if self._spare:
            return None
        waited = self._link.settings.staging_timeout_s
        slot = self._slots.take(waited, self._stop)
        if slot is None:
            return self._stopped() or failures.no_own_slot(self._pull.worker_id, self._slots.num_slots, waited)
        self._spare.append(slot)
        return None

    def _ask(self, number: int) -> None:
        self._owner.ask(self._add(number, self._owner.new_ticket()).body)

    def _add(self, number: int, ticket: int) -> _Asked:
        piece, pull, now = self._cut.pieces[number], self._pull, time.monotonic()
        first_page = pull.first_page + piece.first_page
        layers = self._cut.layers[number]
        parts = {name: part for name, part in pull.landing.parts.items() if name in layers} if pull.landing else {}
        body = Stage(ticket, pull.sequence, first_page, piece.num_pages, layers, parts)
        self._asked.append(_Asked(number, piece, ticket, now, now, body))
        return self._asked[-1]

    def _hear(self) -> Outcome:
        """Take in what the owner has packed, asking again where an answer may be lost."""
        settings = self._link.settings
        for asked in self._asked:
            if asked.answer:
                continue
            asked.answer = self._owner.answer(asked.ticket)
            if asked.answer:
                continue
            now = time.monotonic()
            if now >= asked.since + settings.staging_timeout_s + ANSWER_SLACK_S:
                return failures.nothing_staged(self._pull.worker_id, now - asked.since)
            if now - asked.said >= settings.resend_interval_s:
                asked.said = now
                if is_ahead(asked.ticket):  # nobody can ask for it again: its answer is lost, or went back
                    self._owner.give_back((asked.ticket,))
                    asked.ticket = self._owner.new_ticket()
                    asked.body = replace(asked.body, ticket=asked.ticket)
                self._owner.ask_again(asked.body)
        return None

    # --- moving -------------------------------------------------------------------------------------

    def _post(self) -> Outcome:
        """Put packed pieces on the wire, as far as there are own slots for them."""
        room = self._link.pace.num_posted - self._num_on_the_wire
        for asked in self._asked:
            if not room:
                break
            if asked.answer is None or asked.slot is not None:
                continue
            slot = self._own_slot(asked.answer.slot)
            if slot is None:
                break
            asked.slot = slot
            if failure := self._start(asked, asked.answer, slot):
                return failure
            room -= 1
        return None

    def _own_slot(self, wanted: int) -> int | None:
        """An own slot for what lies in the owner's slot `wanted`: of that number where it can be, so that what was made
        of a pair of slots serves again."""
        if self._spare:
            return self._spare.pop(self._spare.index(wanted) if wanted in self._spare else -1)
        held = sum(one.slot is not None for one in self._asked)
        return self._slots.try_take(wanted) if held < self._link.pace.depth else None

    def _start(self, asked: _Asked, answer: Staged, slot: int) -> Outcome:
        pull = self._pull
        said = (answer, asked.piece.nbytes, self._link.source, pull.sequence, pull.generation)
        failure = failures.unusable(pull.worker_id, *said)
        if failure is None:
            nbytes = asked.piece.nbytes
            asked.handle = self._wire.start(self._link.from_slot(pull.worker_id, answer.slot, slot, nbytes))
            self._timings.head_s = self._timings.head_s or time.perf_counter() - self._began
        return failure

    def _look(self) -> bool | Failure:
        """Whether a piece has landed. The owner's slot is given back at once."""
        landed = False
        for asked in self._asked:
            handle, asked.handle = asked.handle, None
            if handle is None:
                continue
            status = self._wire.look(handle)
            if status is PullStatus.PENDING:
                asked.handle = handle
                continue
            if isinstance(status, Failure):
                return status
            asked.landed = landed = True
            self._owner.has_read(asked.ticket)
            self._landed_at = time.perf_counter()
        return landed

    def _unpack(self) -> bool:
        """Begin to take one piece that has landed to its pages; whether there was one."""
        asked = next((one for one in self._asked if one.landed and one.copying is None), None)
        if asked is None:
            return False
        began = time.perf_counter()
        asked.copying = (asked.unpacking or self._ready(asked)).start()
        self._timings.unpack_s += time.perf_counter() - began
        return True

    def _ready(self, asked: _Asked) -> Prepared:
        assert asked.slot is not None
        address = self._link.arena.area.address(asked.slot)
        return self._copier.prepare(unpack(self._runs_of(asked.piece), self._targets[asked.number], address))

    def _prepare(self) -> bool:
        """Do something ahead of a piece that has not landed; whether there was anything to do."""
        for asked in self._asked:
            if asked.landed or asked.unpacking:
                continue
            if asked.slot is not None:
                asked.unpacking = self._ready(asked)
                return True
            if (asked.piece.first_page, asked.piece.stop_page) not in self._runs:  # the same in whichever slot
                self._runs_of(asked.piece)
                return True
        return False

    def _runs_of(self, piece: Piece) -> list[PageRuns]:
        place = (piece.first_page, piece.stop_page)
        if place not in self._runs:
            num_turns = len(self._pull.landing.tables) if self._pull.landing else 1
            first = self._pull.first_page + piece.first_page
            pages = self._pull.pages[piece.pages]
            self._runs[place] = unpack_runs(pages, first, num_turns, self._copier.wants_runs)
        return self._runs[place]

    def _clear(self) -> bool:
        """Let go of pieces that are unpacked; whether there were any. Raises `BackendError` as copiers do."""
        over = [one for one in self._asked if one.copying and one.copying.is_over]
        for asked in over:
            assert asked.copying is not None
            asked.copying.wait()
            self._asked.remove(asked)
            assert asked.slot is not None
            self._spare.append(asked.slot)
        if over:
            self._spread()
        return bool(over)

    def _spread(self) -> None:
        """Give back own slots that no piece to come needs, or that others wait for: then one is enough to go on."""
        coming = sum(one.slot is None for one in self._asked)
        keep = len(self._todo) + coming
        if self._slots.is_wanted:
            is_held = any(one.slot is not None for one in self._asked)
            keep = 1 if coming and not is_held else 0
        while len(self._spare) > keep:
            self._slots.give(self._spare.pop())

    @property
    def _num_on_the_wire(self) -> int:
        """Pieces that are under way between the two sides."""
        return sum(one.handle is not None for one in self._asked)

    def _wait(self) -> None:
        """Nothing has changed: wait for what comes next."""
        began = time.perf_counter()
        waited = [one.ticket for one in self._asked if one.answer is None]
        if self._num_on_the_wire:
            soonest_s = min(one.handle.nap_s for one in self._asked if one.handle)
            self._wire.nap(max(self._link.pace.nap_s, soonest_s))
            self._timings.wire_s += time.perf_counter() - began
        elif copying := next((one.copying for one in self._asked if one.copying), None):
            if waited:
                time.sleep(COPY_NAP_S)
            else:  # the rest of the pull is in copies, each over in a moment
                copying.wait()
            self._timings.unpack_s += time.perf_counter() - began
        else:
            if not self._owner.wait(waited, SOON_S) and not self._prepare():
                self._owner.wait(waited, LOOK_S)
            self._timings.pack_s += time.perf_counter() - began

    # --- letting go ---------------------------------------------------------------------------------

    def _let_go(self) -> None:
        """Make what is on its way quiet, then give both sides' slots back."""
        for asked in self._asked:
            if asked.handle:
                self._wire.drop(asked.handle)
            if asked.copying:
                try:
                    asked.copying.wait()
                except BackendError as error:  # a device that has failed moves nothing
                    log.error("a piece from %s could not be unpacked: %s", self._pull.worker_id, error)
            if asked.slot is not None:
                self._slots.give(asked.slot)
        self._owner.let_go([one.ticket for one in self._asked if not one.landed])
        self._asked.clear()
        self._give_spare()

    def _give_spare(self) -> None:
        while self._spare:
            self._slots.give(self._spare.pop())

    # --- what goes wrong ----------------------------------------------------------------------------

    def _stopped(self) -> Outcome:
        if not self._stop():
            return None
        return Failure(FailureReason.ABORTED, "stopped by the request", self._pull.worker_id)
