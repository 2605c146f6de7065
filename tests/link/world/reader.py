"""Owns one decode rank of a world: its attempts, its connections, and its pulls, direct and staged, made in steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pdlink.control.frames import Credit, Frame, Stage
from pdlink.decode import failures
from pdlink.decode.actions import Pull
from pdlink.decode.stage_inbox import StageInbox
from pdlink.layout.readers import ReaderSet
from pdlink.transfer.ahead import Ahead, ahead_ticket, is_ahead
from pdlink.transfer.digests import by_component
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.packing import split_turns
from tests.link.world.attempt import Attempt
from tests.link.world.owner import JUNK, Owner

if TYPE_CHECKING:
    from tests.link.world.model import World


@dataclass(eq=False)
class Moving:
    """One pull under way: direct, page by page, or staged, as one piece."""

    attempt: Attempt
    pull: Pull
    is_staged: bool
    ahead: Ahead | None
    todo: list[tuple[int, int, int]]
    """(source page, own page, its turn there)."""
    ticket: int = 0
    asked: float = 0.0
    since: float = 0.0

    @property
    def owner(self) -> Owner:
        return self.attempt.world.by_id[self.pull.worker_id]


class Reader:
    """One decode rank: its attempts, its connections, and a puller for each owner that does one pull at a time."""

    def __init__(self, world: World, readers: ReaderSet) -> None:
        self.world = world
        self.readers = readers
        self.planner = world.planner(readers)
        self.turns = world.turns if readers.num_readers > 1 else 1
        self.start()

    def start(self) -> None:
        """Also after a crash, of which nobody is told."""
        self.life = next(self.world.lives)
        self.attempts: list[Attempt] = []
        self.queue: dict[str, list[Moving]] = {one.worker_id: [] for one in self.world.owners}
        self.inboxes = {one.worker_id: StageInbox() for one in self.world.owners}
        self.connections = dict.fromkeys(self.inboxes, 0)
        self.tickets = itertools.count(1)

    def puller(self, worker_id: str) -> Any:
        ways = SimpleNamespace(inbox=self.inboxes[worker_id], last=None)
        return SimpleNamespace(ways=ways, stats=SimpleNamespace(backend=""))

    def route(self, worker_id: str) -> bytes:
        return f"{self.life}/{worker_id}/{self.connections[worker_id]}".encode()

    def moving_of(self, attempt: Attempt) -> list[Moving]:
        return [one for queued in self.queue.values() for one in queued if one.attempt is attempt]

    def receive(self, transfer_id: str) -> None:
        live = [one for one in self.attempts if one.transfer_id == transfer_id and not one.ended]
        if not live:
            self.attempts.append(Attempt(self.world, self, transfer_id))

    def hear(self, worker_id: str, frame: Frame) -> None:
        found = next((one for one in self.attempts if one.number == frame.attempt), None)
        if found and not found.merge.is_settled and found.transfer_id == frame.transfer_id:
            found.live.dispatch(worker_id, frame.body, self.world.now)
            found.act()

    def tick(self) -> None:
        for one in self.attempts:
            if not one.merge.is_settled:
                one.merge.tick(self.world.now)
                one.act()

    # --- pulling ------------------------------------------------------------------------------------

    def submit(self, attempt: Attempt, pull: Pull) -> None:
        queue = self.queue[pull.worker_id]
        ahead = attempt.live.ahead_of(pull)
        is_staged = bool(pull.batch.moves) and self.world.rng.random() < self.world.staged
        turns = enumerate(split_turns(pull.first_page, len(pull.pages), self.turns))
        todo = []
        for move, turn in zip(pull.batch.moves, (turn for turn, mine in turns if len(mine)), strict=False):
            pairs = zip(move.runs.source_pages().tolist(), move.runs.destination_pages().tolist(), strict=True)
            todo += [(*pair, turn) for pair in pairs]
        if is_staged:  # packed in the order of positions
            todo = [(0, page, (pull.first_page + at) % self.turns) for at, page in enumerate(pull.pages.tolist())]
        if queue:
            ahead = None
        if ahead:
            for index in range(ahead.num_pieces):
                self.inboxes[pull.worker_id].expect(attempt.live.key, ahead_ticket(pull.sequence, index))
        queue.append(Moving(attempt, pull, is_staged, ahead, todo))

    def advance(self, worker_id: str) -> bool:
        """One step of the first pull from an owner; whether there was one to make."""
        queue = self.queue[worker_id]
        if not queue:
            return False
        one = queue[0]
        if one.attempt.live.stop.is_set() and self.world.rng.random() < 0.5:
            self.end(one, Failure(FailureReason.ABORTED, "stopped by the request"))
            return True
        if one.is_staged:
            return self.advance_staged(one)
        if one.todo:
            source, *target = one.todo.pop()
            self.write(one, target, one.owner.pages[source])
        else:
            self.end(one, None)
        return True

    def advance_staged(self, one: Moving) -> bool:
        world, attempt, pull = self.world, one.attempt, one.pull
        inbox = self.inboxes[pull.worker_id]
        if not one.ticket:
            if one.ahead:
                one.ticket = ahead_ticket(pull.sequence, 0)
            else:
                one.ticket = next(self.tickets)
                inbox.expect(attempt.live.key, one.ticket)
                attempt.send(pull.worker_id, self.stage(one))
            one.asked = one.since = world.now
            return True
        answer = inbox.look(attempt.live.key, one.ticket)
        if answer is None:
            if world.now > one.since + world.settings.staging_timeout_s + 1:
                self.end(one, failures.nothing_staged(pull.worker_id, world.now - one.since))
            elif world.now >= one.asked + world.settings.resend_interval_s:
                one.asked = world.now
                if is_ahead(one.ticket):
                    inbox.give_back(attempt.live.key, (one.ticket,), self.sender(one))
                    one.ticket = next(self.tickets)
                    inbox.expect(attempt.live.key, one.ticket)
                attempt.send(pull.worker_id, self.stage(one))
            else:
                return False
            return True
        said = (answer, pull.batch.nbytes, one.owner.arena.area, pull.sequence, pull.generation)
        if failure := failures.unusable(pull.worker_id, *said):
            self.end(one, failure)
            return True
        # Read page by page, whatever becomes of the slot in between.
        if one.todo:
            place = len(one.todo) - 1
            values = one.owner.slot_values[answer.slot]
            self.write(one, one.todo.pop()[1:], values[place] if place < len(values) else JUNK)
            return True
        inbox.forget(attempt.live.key, one.ticket)
        credit = Credit((answer.slot,), (answer.stamp,))
        if world.rng.random() < 0.5:
            attempt.send(pull.worker_id, credit)
            self.end(one, None)
        else:
            self.end(one, None)
            attempt.send(pull.worker_id, credit)
        return True

    def sender(self, one: Moving) -> Any:
        return lambda *bodies: one.attempt.send(one.pull.worker_id, *bodies)

    def stage(self, one: Moving) -> Stage:
        pull = one.pull
        layers = by_component(sorted(pull.cells))
        parts = pull.landing.parts if pull.landing else {}
        return Stage(one.ticket, pull.sequence, pull.first_page, len(pull.pages), layers, parts)

    def write(self, one: Moving, target: Sequence[int], value: Any) -> None:
        """What one source page gives, to a page and turn."""
        assert not one.attempt.ended, "written after the end"
        page, turn = target
        for row in one.pull.rows.tolist():
            one.attempt.memory[row, page, turn] = value

    def end(self, one: Moving, failure: Failure | None) -> None:
        attempt, pull = one.attempt, one.pull
        tickets = [one.ticket] if one.ticket else []
        tickets += [ahead_ticket(pull.sequence, 0)] if one.ahead else []
        self.inboxes[pull.worker_id].give_back(attempt.live.key, tickets, self.sender(one))
        self.queue[pull.worker_id].remove(one)
        attempt.live.on_pulled(pull.worker_id, pull.ticket, failure, self.world.now)
        attempt.act()
