"""Owns a whole link without sockets, threads or clocks: real prefill workers and real merges, and a network, engines,
packing, pulls and time that a random source drives in any order.

Memory is a value per page, so that wrong bytes are seen as such: a page of a request holds (transfer id, position), and
is scribbled over as soon as its engine may reuse it. What a receive reports as DONE is compared cell by cell.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from pdlink.address import Address
from pdlink.backends.slots import SlotPool
from pdlink.bootstrap.messages import PROTOCOL
from pdlink.config import Settings, load_settings
from pdlink.control.frames import Abort, Body, Credit, Frame, Stage, Subscribe
from pdlink.decode import failures
from pdlink.decode.actions import MergePlan, Pull, Resubscribe, Send
from pdlink.decode.live import Live
from pdlink.decode.merge import Merge
from pdlink.decode.receiver import Receiver
from pdlink.decode.request import build_request
from pdlink.decode.stage_inbox import StageInbox
from pdlink.events import Events
from pdlink.layout.fingerprint import fingerprint
from pdlink.layout.layer_plan import LayerPlan, PlanKind
from pdlink.layout.parallel import ParallelSizes
from pdlink.layout.readers import ReaderSet
from pdlink.layout.staging import StagingArea
from pdlink.prefill import stager
from pdlink.prefill.packer import Ticket
from pdlink.prefill.sender import Sender
from pdlink.prefill.worker import PrefillRank, PrefillWorker
from pdlink.transfer.ahead import Ahead, ahead_ticket, is_ahead
from pdlink.transfer.digests import by_component
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.planner import PullPlanner, Source
from pdlink.transfer.states import ReceiverState
from tests.decode.rig import PAGE_SIZE, make_layout, make_regions

POOL_PAGES = 10
SLOT_BYTES = 16 << 20
SETTINGS = load_settings(
    {}, transfer_timeout_s=90.0, progress_timeout_s=20.0, publication_lease_s=60.0, verdict_ttl_s=8.0, max_transfers=100
)
"""Shorter than the defaults, so that what is forgotten some day is forgotten within a run."""
STEP_S = 0.25
MAX_ON_WIRE = 40
REMEMBERED = 60
MAX_READERS = 5
JUNK: Any = "junk"


@dataclass(eq=False)
class Message:
    """`owner` is where a frame goes to; without one it goes back along `route`."""

    frame: Frame
    route: bytes
    worker_id: str
    to_owner: bool
    seen: tuple[float, int] = (0.0, 0)
    """When it was last delivered, and in which life of its owner."""


class Timer:
    def __init__(self, due: float, call: Callable[[], None]) -> None:
        self.due = due
        self.call = call

    def cancel(self) -> None:
        self.call = lambda: None


class QuietLoop:
    """What a prefill worker needs of a control loop, without a thread."""

    def __init__(self, world: World, worker_id: str) -> None:
        self.world = world
        self.worker_id = worker_id
        self.timers: list[Timer] = []
        self.handler: Callable[[bytes, Frame], None] = lambda route, frame: None
        self.address = Address("127.0.0.1", 1)

    def clock(self) -> float:
        return self.world.now

    def call_soon(self, call: Callable[[], None]) -> bool:
        call()
        return True

    def on_death(self, told: object) -> None:
        pass

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(self.world.now + delay_s, call))
        return self.timers[-1]

    def bind(self, address: Address, handler: Callable[[bytes, Frame], None], *rest: object) -> QuietLoop:
        self.handler = handler
        return self

    def send(self, route: bytes, frame: Frame) -> None:
        self.world.post(Message(frame, route, self.worker_id, to_owner=False))

    def close(self) -> None:
        self.handler = lambda route, frame: None

    def run_due(self) -> None:
        due = [one for one in self.timers if one.due <= self.world.now]
        self.timers = [one for one in self.timers if one.due > self.world.now]
        for one in due:
            one.call()


class QuietPacker:
    """Packs when it is told to, in the order of what was put, as the thread does."""

    death = None

    def __init__(self, done: Callable[[Ticket, Failure | None], None], slots: SlotPool) -> None:
        self.done = done
        self.slots = slots
        self.tickets: list[Ticket] = []

    def put(self, ticket: Ticket) -> None:
        self.tickets.append(ticket)

    def close(self) -> None:
        for ticket in self.tickets:
            self.done(ticket, None)
        self.tickets.clear()


class Owner:
    """One prefill rank over its lives: its worker, its engine's pages, and what is packed in its slots."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.lives = 0
        self.start()

    def start(self) -> None:
        world = self.world
        self.lives += 1
        rank, owned = world.ranks[self.number], world.owned[self.number]
        self.pages: list[Any] = [JUNK] * POOL_PAGES
        self.slot_values: list[list[Any]] = [[] for _ in range(world.num_slots)]
        self.held: dict[str, dict[int, Sender]] = {}
        """Transfer id -> page -> the request that has published it."""
        self.senders: dict[str, Sender] = {}
        self.published: dict[str, int] = {}
        self.said_last: set[str] = set()
        self.half_packed: Ticket | None = None
        info = PrefillRank(
            "pre",
            world.layout,
            world.sizes,
            rank,
            world.kinds,
            owned,
            world.regions[self.number],
            incarnation=self.lives,
        )
        self.loop = QuietLoop(world, info.worker_id)
        area = StagingArea(1 << 45, SLOT_BYTES, world.num_slots, ("ipc",))
        self.arena = SimpleNamespace(slots=SlotPool(world.num_slots), area=area)
        self.packer: QuietPacker | None = None

        def make(worker_id: str, arena: Any, timeout_s: float, clock: Any, done: Any, *rest: object) -> QuietPacker:
            self.packer = QuietPacker(done, arena.slots)
            return self.packer

        with mock.patch.object(stager, "Packer", make):
            self.worker = PrefillWorker(info, world.settings, self.loop, {}, Events(), self.arena)  # type: ignore[arg-type]

    @property
    def worker_id(self) -> str:
        return self.worker.rank.worker_id

    # --- the engine ---------------------------------------------------------------------------------

    def open(self, transfer_id: str) -> None:
        known = self.senders.get(transfer_id)
        if known and not known.poll().is_final:
            return
        self.senders[transfer_id] = self.worker.open(transfer_id)
        self.published[transfer_id] = 0
        self.said_last.discard(transfer_id)

    def free_pages(self) -> list[int]:
        """Pages that no request may still be read from."""
        held = {page for of in self.held.values() for page, sender in of.items() if not sender.poll().is_final}
        return [page for page in range(POOL_PAGES) if page not in held]

    def publish(self, transfer_id: str, most: int) -> None:
        sender = self.senders.get(transfer_id)
        if sender is None or sender.poll().is_final or transfer_id in self.said_last:
            return
        start = self.published[transfer_id]
        free = self.free_pages()
        self.world.rng.shuffle(free)
        chosen = free[: min(most, self.world.num_pages - start)]
        for number, page in enumerate(chosen):
            self.pages[page] = (transfer_id, start + number)
            self.held.setdefault(transfer_id, {})[page] = sender
        last = start + len(chosen) == self.world.num_pages
        self.published[transfer_id] += len(chosen)
        if last:
            self.said_last.add(transfer_id)
        sender.publish(chosen, last=last, aux=b"tok" if last else None)

    def withdraw(self, transfer_id: str) -> None:
        sender = self.senders.get(transfer_id)
        if sender is None:
            return
        mine = [page for page, of in self.held.get(transfer_id, {}).items() if of is sender]
        taken = mine[: max(1, len(mine) // 2)]
        sender.withdraw(taken)
        for page in taken:
            self.held[transfer_id].pop(page)
        self.scribble()

    def scribble(self) -> None:
        """Reuse every page that the engine may reuse."""
        for page in self.free_pages():
            self.pages[page] = JUNK

    def restart(self) -> None:
        """Killed: nobody is told. What is on the wire may reach the new process."""
        self.loop.handler = lambda route, frame: None
        self.start()

    # --- packing ------------------------------------------------------------------------------------

    def pack(self) -> bool:
        """One step of the packing thread: take a slot and copy, or report."""
        packer = self.packer
        if packer is None:
            return False
        if ticket := self.half_packed:
            self.half_packed = None
            packer.done(ticket, None)
            return True
        if not packer.tickets:
            return False
        ticket = packer.tickets[0]
        if ticket.slot is None and not ticket.over:
            ticket.slot = packer.slots.try_take()
            if ticket.slot is None:
                return False
        packer.tickets.pop(0)
        if ticket.over:
            packer.done(ticket, None)
            return True
        job = ticket.job
        ids = job.publication.page_ids[job.start : job.start + job.num_pages].tolist()
        assert ticket.slot is not None
        self.slot_values[ticket.slot] = [self.pages[page] for page in ids]
        self.half_packed = ticket
        return True


@dataclass(eq=False)
class Moving:
    """One pull under way: direct, page by page, or staged, as one piece."""

    attempt: Attempt
    pull: Pull
    is_staged: bool
    ahead: Ahead | None
    todo: list[tuple[int, int]]
    ticket: int = 0
    asked: float = 0.0
    since: float = 0.0

    @property
    def owner(self) -> Owner:
        return self.attempt.world.by_id[self.pull.worker_id]


class Attempt:
    """One receive of one decode rank, carried out as the decode worker and the pullers do."""

    def __init__(self, world: World, reader: Reader, transfer_id: str) -> None:
        self.world = world
        self.reader = reader
        self.transfer_id = transfer_id
        self.number = next(world.attempts)
        pages = world.rng.sample(range(32), world.wanted)
        request = build_request(
            world.layout,
            transfer_id,
            {"kv": pages},
            world.num_pages * PAGE_SIZE,
            prefix_tokens=(world.num_pages - world.wanted) * PAGE_SIZE,
            readers=reader.readers,
            expect_aux=world.expect_aux,
        )
        self.target = pages
        self.memory: dict[tuple[int, int], Any] = {}
        self.merge = Merge(request, world.settings, world.now)
        self.opened = world.now
        receiver = Receiver(transfer_id, self.number, lambda one, text: None)
        self.live = Live(self.merge, receiver, None)  # type: ignore[arg-type]
        self.incarnations = {one.worker_id: one.lives for one in world.owners}
        ranks = {one.worker_id: self.rank_link(one.worker_id) for one in world.owners}
        self.live.link = SimpleNamespace(ranks=ranks)  # type: ignore[assignment]
        self.ended: ReceiverState | None = None
        self.is_resolved = False

    def resolve(self) -> None:
        if not self.is_resolved:
            self.is_resolved = True
            plan = MergePlan(self.world.planner, self.incarnations, self.world.aux_owner)
            self.merge.on_resolved(plan, self.world.now)
            self.act()

    def rank_link(self, worker_id: str) -> Any:
        def send(*frames: Frame) -> None:
            for frame in frames:
                self.world.post(Message(frame, self.reader.route(worker_id), worker_id, to_owner=True))

        return SimpleNamespace(puller=self.reader.puller(worker_id), channel=SimpleNamespace(send=send))

    def send(self, worker_id: str, *bodies: Body) -> None:
        self.live.send(worker_id, *bodies)

    def act(self) -> None:
        for action in self.merge.drain():
            if isinstance(action, Pull):
                self.reader.submit(self, action)
            elif isinstance(action, Resubscribe):
                self.send(action.worker_id, self.subscribe(action.worker_id, action.next_sequence))
            elif isinstance(action, Send):
                self.send(action.worker_id, action.body)
            else:
                self.live.stop.set()
        state = self.merge.state
        if self.ended:
            assert state is self.ended, "a final state was left"
        elif state.is_final:
            self.ended = state
            assert not self.reader.moving_of(self), "reported while a pull may still land"
            if state is ReceiverState.DONE:
                self.check()

    def check(self) -> None:
        world = self.world
        first = world.num_pages - world.wanted
        for group in world.planner.groups.values():
            for row in range(group.num_rows):
                for number, page in enumerate(self.target):
                    found = self.memory.get((row, page))
                    assert found == (self.transfer_id, first + number), f"row {row}, page {page} holds {found}"

    def subscribe(self, worker_id: str, next_sequence: int) -> Subscribe:
        if worker_id not in self.live.ahead:
            may = self.reader.queue[worker_id] == [] and self.world.rng.random() < self.world.staged
            self.live.ahead[worker_id] = Ahead(SLOT_BYTES, 1) if may else None
        ahead = self.live.ahead[worker_id] or Ahead(0, 0)
        return Subscribe(
            PROTOCOL,
            self.world.digest,
            self.merge.request.readers,
            self.incarnations[worker_id],
            self.merge.request.spans(),
            next_sequence,
            ("ipc",),
            None,
            ahead.piece_bytes,
            ahead.num_pieces,
        )


class Reader:
    """One decode rank: its attempts, its connections, and a puller for each owner that does one pull at a time."""

    def __init__(self, world: World, readers: ReaderSet) -> None:
        self.world = world
        self.readers = readers
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
        todo = []
        for move in pull.batch.moves:
            todo = list(zip(move.runs.source_pages().tolist(), move.runs.destination_pages().tolist(), strict=True))
        if is_staged:  # packed in the order of positions
            todo = [(0, page) for page in pull.pages.tolist()]
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
            source, target = one.todo.pop()
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
        nbytes = sum(move.layers.page_bytes.sum() * len(pull.pages) for move in pull.batch.moves)
        said = (answer, int(nbytes), one.owner.arena.area, pull.sequence, pull.generation)
        if failure := failures.unusable(pull.worker_id, *said):
            self.end(one, failure)
            return True
        # Read page by page, whatever becomes of the slot in between.
        if one.todo:
            place = len(one.todo) - 1
            values = one.owner.slot_values[answer.slot]
            self.write(one, one.todo.pop()[1], values[place] if place < len(values) else JUNK)
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
        return Stage(one.ticket, pull.sequence, pull.first_page, len(pull.pages), layers)

    def write(self, one: Moving, target: int, value: Any) -> None:
        assert not one.attempt.ended, "written after the end"
        for row in one.pull.rows.tolist():
            one.attempt.memory[row, target] = value

    def end(self, one: Moving, failure: Failure | None) -> None:
        attempt, pull = one.attempt, one.pull
        tickets = [one.ticket] if one.ticket else []
        tickets += [ahead_ticket(pull.sequence, 0)] if one.ahead else []
        self.inboxes[pull.worker_id].give_back(attempt.live.key, tickets, self.sender(one))
        self.queue[pull.worker_id].remove(one)
        attempt.live.on_pulled(pull.worker_id, pull.ticket, failure, self.world.now)
        attempt.act()


class World:
    """`run` makes random steps; `settle` then lets everybody do their part, and looks at what is left."""

    def __init__(self, rng: random.Random, settings: Settings) -> None:
        self.rng = rng
        self.settings = settings
        self.now = 1000.0
        self.loss = rng.choice([0.0, 0.02, 0.2])
        self.repeats = rng.choice([0.0, 0.05, 0.3])
        self.disorder = rng.choice([0.0, 0.3, 0.9])
        self.delivered = rng.choice([0.15, 0.3, 0.5])
        """The share of steps that deliver a frame: the less, the more are under way."""
        self.faults = rng.choice([0.0, 0.2, 0.6])
        self.staged = rng.choice([0.0, 0.6, 1.0, 1.0])
        self.num_slots = rng.choice([1, 2])
        self.wire: list[Message] = []
        self.old: list[Message] = []
        """Frames that were on the wire, to come again much later."""
        self.attempts = itertools.count(1)
        self.lives = itertools.count(1)
        self.layout = make_layout(2)
        self.digest = fingerprint(self.layout).digest
        self.sizes = ParallelSizes(cp=rng.choice([1, 2, 2, 3]))
        kind = rng.choice([PlanKind.SPLIT, PlanKind.SPLIT, PlanKind.REPLICATED])
        plan = LayerPlan.balanced(self.layout, self.sizes, kind)
        self.kinds = plan.kinds
        self.ranks = list(self.sizes.ranks())
        self.owned = [plan.owned[rank] for rank in self.ranks]
        self.regions = [make_regions(self.layout, cells, (number + 2) << 40) for number, cells in enumerate(self.owned)]
        self.num_pages = rng.randint(1, 4)
        self.wanted = rng.choice([self.num_pages, self.num_pages, rng.randint(0, self.num_pages)])
        self.expect_aux = rng.random() < 0.5
        self.ids = ["t", "u"] if rng.random() < 0.5 else ["t"]
        self.owners = [Owner(self, number) for number in range(len(self.ranks))]
        self.by_id = {one.worker_id: one for one in self.owners}
        whole = {one.name: one.layers for one in self.layout.components}
        sources = [Source(one.worker_id, tuple(self.regions[one.number])) for one in self.owners]
        self.planner = PullPlanner(self.layout, sources, make_regions(self.layout, whole, 1 << 40))
        aux = [one for one in self.owners if one.worker._facts.is_aux_owner]
        self.aux_owner = aux[-1].worker_id if aux else self.owners[0].worker_id
        num_readers = rng.choice([1, 1, 2])
        self.readers = [Reader(self, ReaderSet("dec", index, num_readers)) for index in range(num_readers)]
        if rng.random() < 0.2:
            self.readers.append(Reader(self, ReaderSet("other")))
        self.every_attempt: list[Attempt] = []

    def close(self) -> None:
        for one in self.owners:
            one.worker.close()

    # --- the network --------------------------------------------------------------------------------

    def post(self, message: Message) -> None:
        self.wire.append(message)
        if len(self.wire) > MAX_ON_WIRE:
            self.wire.pop(0)

    def deliver(self, message: Message) -> None:
        frame = message.frame
        if message.to_owner:
            self.by_id[message.worker_id].loop.handler(message.route, frame)
            return
        for reader in self.readers:
            if reader.route(message.worker_id) == message.route:
                reader.hear(message.worker_id, frame)

    def remember(self, message: Message) -> None:
        message.seen = (self.now, self.by_id[message.worker_id].lives)
        self.old.append(message)
        if len(self.old) > REMEMBERED:
            self.old.pop(self.rng.randrange(REMEMBERED))

    # --- any step -----------------------------------------------------------------------------------

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()
            for owner in self.owners:
                owner.scribble()

    def step(self) -> None:
        rng = self.rng
        if self.wire and rng.random() < self.delivered:
            self.network()
            return
        dice = rng.uniform(0.5, 1.0)
        if dice < 0.63:
            rng.choice(self.readers).advance(rng.choice(self.owners).worker_id)
        elif dice < 0.71:
            rng.choice(self.owners).pack()
        elif dice < 0.79:
            rng.choice(self.owners).publish(rng.choice(self.ids), rng.randint(1, 3))
        elif dice < 0.83:
            rng.choice(self.owners).open(rng.choice(self.ids))
        elif dice < 0.86:
            rng.choice(self.readers).receive(rng.choice(self.ids))
        elif dice < 0.90:
            unresolved = [one for reader in self.readers for one in reader.attempts if not one.is_resolved]
            if unresolved:
                rng.choice(unresolved).resolve()
        elif dice < 0.95:
            self.pass_time(rng.choice([0.05, 0.3, 0.6]))
        elif rng.random() < self.faults:
            self.fault()

    def network(self) -> None:
        rng = self.rng
        number = rng.randrange(len(self.wire)) if rng.random() < self.disorder else 0
        if rng.random() < self.loss:
            self.wire.pop(number)
            return
        message = self.wire[number] if rng.random() < self.repeats else self.wire.pop(number)
        self.remember(message)
        self.deliver(message)

    def fault(self) -> None:
        rng = self.rng
        dice = rng.random()
        if dice < 0.12:
            rng.choice(self.owners).withdraw(rng.choice(self.ids))
        elif dice < 0.2:
            sender = rng.choice(self.owners).senders.get(rng.choice(self.ids))
            if sender:
                sender.abort()
        elif dice < 0.26:
            self.restart(rng.choice(self.owners))
        elif dice < 0.32:
            rng.choice(self.readers).start()
        elif dice < 0.42:
            attempts = [one for reader in self.readers for one in reader.attempts]
            if attempts:
                one = rng.choice(attempts)
                one.merge.fail(Failure(FailureReason.ABORTED, "enough"), self.now)
                one.act()
        elif dice < 0.5:
            reader, owner = rng.choice(self.readers), rng.choice(self.owners)
            reader.connections[owner.worker_id] += 1
        elif dice < 0.75 and self.old:
            for _ in range(rng.randint(1, 4)):
                self.deliver(rng.choice(self.old))
        elif dice < 0.85:
            self.pass_time(rng.choice([2.0, 6.0, 16.0]))
        elif dice < 0.92:
            self.stop_some()
        else:
            attempt = self.forge()
            if attempt:
                self.deliver(attempt)

    def restart(self, owner: Owner) -> None:
        owner.restart()
        if self.rng.random() < 0.7:
            for reader in self.readers:
                for one in reader.attempts:
                    if one.is_resolved:
                        one.merge.on_incarnation(owner.worker_id, owner.lives, self.now)
                        one.act()

    def stop_some(self) -> None:
        """One side stands still while the other's clock goes on."""
        stopped = self.rng.choice([*self.owners, *self.readers])
        if isinstance(stopped, Reader) and len(self.readers) < MAX_READERS and self.rng.random() < 0.7:
            # Somebody has started another process in its place; the first one will go on.
            self.readers.append(Reader(self, stopped.readers))
            for one in stopped.attempts:
                self.readers[-1].receive(one.transfer_id)
            for one in self.readers[-1].attempts:
                one.resolve()
        num_steps = self.rng.choice([20, 80, 280])
        for _ in range(num_steps):
            self.now += STEP_S
            for owner in self.owners:
                if owner is not stopped:
                    owner.loop.run_due()
            for reader in self.readers:
                if reader is not stopped:
                    reader.tick()
            for message in list(self.wire):
                to = self.by_id[message.worker_id] if message.to_owner else self.reader_at(message)
                if to is not stopped and message in self.wire:
                    self.wire.remove(message)
                    self.deliver(message)
        for one in stopped.attempts if isinstance(stopped, Reader) else ():
            one.merge.excuse(num_steps * STEP_S)

    def reader_at(self, message: Message) -> Reader | None:
        return next((one for one in self.readers if one.route(message.worker_id) == message.route), None)

    def forge(self) -> Message | None:
        """A frame of a kind that means something, from an attempt that does not exist."""
        rng = self.rng
        worker_id = rng.choice(self.owners).worker_id
        kind = rng.choice([Abort, Credit, Stage])
        readers = rng.choice(self.readers).readers
        body: Body
        if kind is Abort:
            body = Abort(Failure(FailureReason.ABORTED, "forged"), ReaderSet("nobody", 0, readers.num_readers))
        elif kind is Credit:
            body = Credit((rng.randrange(self.num_slots),), (rng.randrange(1 << 60),))
        else:
            body = Stage(1, 0, 0, 1, {"latent": (0,)})
        return Message(Frame(rng.choice(self.ids), 1 << 60, body), b"forged", worker_id, to_owner=True)

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + STEP_S)
            for owner in self.owners:
                owner.loop.run_due()
            for reader in self.readers:
                reader.tick()

    # --- the end ------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Everybody does their part from now on. All ends within the sum of the deadlines, and nothing is left."""
        settings = self.settings
        for reader in self.readers:
            for one in reader.attempts:
                one.resolve()
        longest = settings.transfer_timeout_s + settings.publication_lease_s + settings.confirm_timeout_s + 30
        end = self.now + longest
        while self.now < end and not self.is_over():
            for _ in range(200):
                moved = bool(self.wire)
                if self.wire:
                    self.deliver(self.wire.pop(0))
                for owner in self.owners:
                    moved |= owner.pack()
                    moved |= any(reader.advance(owner.worker_id) for reader in self.readers)
                if not moved:
                    break
            self.pass_time(STEP_S)
        self.pass_time(2.0)
        self.look()
        self.haunt()
        self.pass_time(2.0)
        self.look()

    def is_over(self) -> bool:
        attempts = all(one.merge.is_settled for reader in self.readers for one in reader.attempts)
        senders = all(self.holds_nothing(sender) for owner in self.owners for sender in owner.senders.values())
        return attempts and senders and not self.wire

    @staticmethod
    def holds_nothing(sender: Sender) -> bool:
        return sender.poll().is_final or sender.publication(0) is None

    def haunt(self) -> None:
        """Frames of what is over come again: they change and make nothing."""
        before = self.states()
        for message in list(self.old):
            when, life = message.seen
            is_known = self.now - when < self.settings.verdict_ttl_s and life == self.by_id[message.worker_id].lives
            if is_known and not (isinstance(message.frame.body, Subscribe) and self.may_begin(message)):
                self.deliver(message)
        self.wire.clear()
        now = self.states()
        assert now == before, [pair for pair in zip(before, now, strict=True) if pair[0] != pair[1]]

    def may_begin(self, message: Message) -> bool:
        """A request that has published nothing, or that its engine has not opened again, may be subscribed to."""
        sender = self.by_id[message.worker_id].senders.get(message.frame.transfer_id)
        return sender is None or not sender.poll().is_final

    def states(self) -> list[object]:
        senders = [(id(one), one.poll()) for owner in self.owners for one in owner.senders.values()]
        return senders + [(one.number, one.merge.state) for reader in self.readers for one in reader.attempts]

    def look(self) -> None:
        for reader in self.readers:
            for one in reader.attempts:
                assert one.merge.state.is_final, f"attempt {one.number} is {one.merge.state}"
                assert one.merge.is_settled, f"attempt {one.number} still speaks"
            for worker_id, inbox in reader.inboxes.items():
                assert not inbox._answers, f"answers of {worker_id} are still expected: {inbox._answers}"
        for owner in self.owners:
            for sender in owner.senders.values():
                assert self.holds_nothing(sender), f"{owner.worker_id} is {sender.poll()} for ever"
            while owner.pack():
                pass
            assert owner.arena.slots.num_free == self.num_slots, f"{owner.worker_id} has lost a slot"
            stage = owner.worker._desk._stager
            assert stage is None or not stage._readings


@contextmanager
def world(rng: random.Random) -> Iterator[World]:
    made = World(rng, SETTINGS if rng.random() < 0.5 else SETTINGS.model_copy(update={"verdict_ttl_s": 60.0}))
    try:
        yield made
    finally:
        made.close()


def walk(rng: random.Random, num_steps: int) -> World:
    """One random life of a world, from its first step to its end."""
    with world(rng) as made:
        made.run(num_steps)
        made.settle()
    return made
