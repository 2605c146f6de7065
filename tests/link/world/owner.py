"""Owns one prefill rank of a world: a real worker, the engine that it serves, and packing in steps."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from pdlink.backends.slots import SlotPool
from pdlink.events import Events
from pdlink.layout.staging import StagingArea
from pdlink.prefill import stager
from pdlink.prefill.packer import Ticket
from pdlink.prefill.rank import PrefillRank
from pdlink.prefill.sender import Sender
from pdlink.prefill.worker import PrefillWorker
from pdlink.transfer.failure import Failure
from tests.link.world.loop import QuietLoop

if TYPE_CHECKING:
    from tests.link.world.model import World

POOL_PAGES = 10
SLOT_BYTES = 16 << 20
JUNK: Any = "junk"
"""What a page holds that its engine may reuse."""


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
