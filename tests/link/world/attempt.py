"""Owns one receive of a world: a real merge, whose actions are carried out as the decode worker does, and the memory
that it fills, checked cell by cell once it says DONE.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pdlink.bootstrap.messages import PROTOCOL
from pdlink.control.frames import Body, Frame, Subscribe
from pdlink.decode.actions import MergePlan, Pull, Resubscribe, Send
from pdlink.decode.live import Live
from pdlink.decode.merge import Merge
from pdlink.decode.receiver import Receiver
from pdlink.decode.request import build_request
from pdlink.transfer.ahead import Ahead
from pdlink.transfer.states import ReceiverState
from tests.decode.rig import PAGE_SIZE
from tests.link.world.network import Message
from tests.link.world.owner import SLOT_BYTES

if TYPE_CHECKING:
    from tests.link.world.model import World
    from tests.link.world.reader import Reader


class Attempt:
    """One receive of one decode rank, carried out as the decode worker and the pullers do."""

    def __init__(self, world: World, reader: Reader, transfer_id: str) -> None:
        self.world = world
        self.reader = reader
        self.transfer_id = transfer_id
        self.number = next(world.attempts)
        turns, first = reader.turns, world.num_pages - world.wanted
        count = -(-world.num_pages // turns) - first // turns if world.wanted else 0
        pages = world.rng.sample(range(32), count)
        request = build_request(
            world.layout,
            transfer_id,
            {"kv": pages},
            world.num_pages * PAGE_SIZE,
            prefix_tokens=first * PAGE_SIZE,
            readers=reader.readers,
            expect_aux=world.expect_aux,
            turns=turns,
        )
        self.memory: dict[tuple[int, int, int], Any] = {}
        """(row, own page, turn) -> what is there."""
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
            plan = MergePlan(self.reader.planner, self.incarnations, self.world.aux_owner)
            self.merge.on_resolved(plan, self.world.now)
            self.act()

    def rank_link(self, worker_id: str) -> Any:
        def send(*frames: Frame) -> None:
            for frame in frames:
                self.world.network.post(Message(frame, self.reader.route(worker_id), worker_id, to_owner=True))

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
        request, turns = self.merge.request, self.reader.turns
        first = request.first_page["kv"]
        for group in self.reader.planner.groups.values():
            for row in range(group.num_rows):
                for position in range(first, first + request.num_pages["kv"]):
                    place = (int(request.targets("kv", position, position + 1)[0]), position % turns)
                    found = self.memory.get((row, *place))
                    assert found == (self.transfer_id, position), f"row {row}, page and turn {place} holds {found}"

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
            parts=self.reader.planner.parts_from(worker_id),
        )
