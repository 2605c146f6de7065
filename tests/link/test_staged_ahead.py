"""Pieces that an owner stages unasked: they spare a round trip where all fits, and cost a moment elsewhere."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import random
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from pdlink.control.frames import Credit, Frame, Ready, Stage, Staged, Subscribe
from pdlink.decode import live, way_picker
from pdlink.decode.receiver import Receiver
from pdlink.decode.staging_link import PACES
from pdlink.layout.regions import MemoryKind
from pdlink.prefill.sender import Sender
from pdlink.transfer.ahead import ahead_ticket, is_ahead
from pdlink.transfer.states import ReceiverState, SenderState
from pdlink.transfer.ways import Way, WayChoice
from tests.link.proxy import put_between
from tests.link.rig import DEADLINE_S, PAGE_SIZE, Decode, Owner, Site, assert_all, finished, make_layout, wait_until
from tests.link.staged import (
    NUM_PAGES,
    arena,
    assert_slots_back,
    gated,
    give_all,
    hold_all,
    num_packed,
    publish_scattered,
    receive,
    serve,
    staged_site,
)
from tests.link.test_frames import Once, _unreliable

pytestmark = pytest.mark.backend("ipc")

BodyT = TypeVar("BodyT")
DEPTH = 2
"""Pieces that are staged unasked here: as many as an owner has slots."""


@pytest.fixture
def site(stack: contextlib.ExitStack) -> Site:
    return staged_site(stack)


class Pair:
    """One owner and one decode rank that have moved a request by the staged way before, and what passes between."""

    def __init__(self, site: Site, stack: contextlib.ExitStack, warm: bool = True, **settings: object) -> None:
        self.site = site
        self.owners = site.prefill(make_layout(4), 1, register=False, **settings)
        self.owner: Owner = self.owners[0]
        self.decode: Decode
        self.decode, self.gate = gated(site, keepalive_interval_s=0.1)
        self.gate.open.set()
        (self.proxy,) = put_between(site, stack, self.owners)
        if warm:
            serve(site, self.owners, self.decode)
            wait_until(lambda: self.decode.worker.num_receives == 0)
        self.proxy.seen.clear()

    def receive(self, transfer_id: str = "t") -> tuple[Receiver, dict[str, list[int]]]:
        """A request whose subscribe is through, so that it is the publication that finds it waiting."""
        receiver, target = receive(self.site, self.decode, transfer_id)
        wait_until(lambda: receiver.poll() is ReceiverState.SUBSCRIBED)
        wait_until(
            lambda: (sender := self.owner.worker._requests.senders.get(transfer_id)) is None or bool(sender.attempts())
        )
        return receiver, target

    def open(self, transfer_id: str = "t") -> tuple[Sender, list[int]]:
        pages = self.site.scatter(self.owner.pool, NUM_PAGES)
        return self.owner.open(transfer_id, {"kv": pages}), pages

    def move(self, transfer_id: str = "t") -> None:
        """A whole request, and that everything came and came back."""
        sender, pages = self.open(transfer_id)
        receiver, target = self.receive(transfer_id)
        sender.publish(pages, last=True)
        receiver.wait(DEADLINE_S)
        assert self.decode.pool.find_wrong(transfer_id, target) is None
        assert_all([sender], SenderState.RELEASED)
        assert_slots_back([self.decode.node, self.owner.node])

    def frames(self, kind: type[BodyT], transfer_id: str = "t") -> list[BodyT]:
        return [
            frame.body
            for _, frame in self.proxy.seen
            if frame.transfer_id == transfer_id and isinstance(frame.body, kind)
        ]

    def told(self, transfer_id: str = "t") -> list[int]:
        """How many pieces each publication said were staged unasked, when it was told for the first time."""
        first: dict[int, int] = {}
        for one in self.frames(Ready, transfer_id):
            first.setdefault(one.sequence, one.staged_pieces)
        return list(first.values())


@pytest.fixture
def pair(site: Site, stack: contextlib.ExitStack) -> Pair:
    return Pair(site, stack)


def test_the_first_pieces_come_unasked_and_the_others_are_asked_for(pair: Pair) -> None:
    pair.move()
    assert pair.told() == [DEPTH]
    tickets = {one.ticket for one in pair.frames(Staged)}
    unasked = {ticket for ticket in tickets if is_ahead(ticket)}
    assert len(unasked) == DEPTH
    assert {one.ticket for one in pair.frames(Stage)} == tickets - unasked
    assert tickets - unasked
    kinds = [type(frame.body) for _, frame in pair.proxy.seen if frame.transfer_id == "t"]
    assert kinds.index(Ready) < kinds.index(Staged)


def test_nothing_is_staged_unasked_before_a_pull_from_that_owner_was_staged(
    site: Site, stack: contextlib.ExitStack
) -> None:
    pair = Pair(site, stack, warm=False)
    pair.move()
    assert pair.told() == [0]
    assert not any(is_ahead(one.ticket) for one in pair.frames(Staged))


def without(kind: type, **changes: object) -> Callable[[Frame], tuple[Frame, ...]]:
    """As a peer says it that does not know the fields."""

    def rule(frame: Frame) -> tuple[Frame, ...]:
        if not isinstance(frame.body, kind):
            return (frame,)
        return (dataclasses.replace(frame, body=dataclasses.replace(frame.body, **changes)),)

    return rule


def test_a_reader_that_does_not_know_of_it_is_served_as_ever(pair: Pair) -> None:
    pair.proxy.to_prefill = without(Subscribe, stage_bytes=0, stage_pieces=0)
    pair.move()
    assert pair.told() == [0]


def test_an_owner_that_does_not_know_of_it_is_asked_as_ever(pair: Pair) -> None:
    """What comes unasked all the same goes back."""
    pair.proxy.to_decode = without(Ready, staged_pieces=0)
    pair.move()
    tickets = {one.ticket for one in pair.frames(Staged) if not is_ahead(one.ticket)}
    assert {one.ticket for one in pair.frames(Stage)} == tickets
    stamps = {one.stamp for one in pair.frames(Staged)}
    assert {stamp for one in pair.frames(Credit) for stamp in one.stamps} == stamps


def test_an_owner_that_says_more_than_it_does_is_asked(pair: Pair) -> None:
    pair.proxy.to_prefill = without(Subscribe, stage_bytes=0, stage_pieces=0)
    pair.proxy.to_decode = without(Ready, staged_pieces=1 << 20)
    pair.move()


@pytest.mark.parametrize("kind", [Ready, Staged, Credit, Subscribe, Stage])
def test_a_frame_that_is_lost_costs_a_moment_and_no_slot(pair: Pair, kind: type) -> None:
    lost = Once(kind)
    if kind in (Ready, Staged):
        pair.proxy.to_decode = lost
    else:
        pair.proxy.to_prefill = lost
    pair.move()
    assert lost.done


def test_pieces_whose_answers_are_all_lost_are_asked_for_and_come_back(pair: Pair) -> None:
    """The owner reminds its reader of what that does not know any more."""
    lost: set[int] = set()

    def lose(frame: Frame) -> tuple[Frame, ...]:
        if isinstance(frame.body, Staged) and is_ahead(frame.body.ticket) and frame.body.ticket not in lost:
            lost.add(frame.body.ticket)
            return ()
        return (frame,)

    pair.proxy.to_decode = lose
    pair.move()
    assert len(lost) == DEPTH


@pytest.mark.parametrize("seed", range(2))
def test_requests_survive_frames_that_are_repeated_lost_and_reordered(pair: Pair, seed: int) -> None:
    chance = random.Random(seed)
    pair.proxy.to_prefill, pair.proxy.to_decode = _unreliable(chance), _unreliable(chance)
    for number in range(4):
        sender, pages = pair.open(f"t{number}")
        receiver, target = receive(pair.site, pair.decode, f"t{number}")
        sender.publish(pages, last=True)
        receiver.wait(DEADLINE_S)
        assert pair.decode.pool.find_wrong(f"t{number}", target) is None
        assert_all([sender], SenderState.RELEASED)
    assert_slots_back([pair.decode.node, pair.owner.node])


def test_a_reader_without_a_slot_of_its_own_holds_none_of_the_owners(pair: Pair) -> None:
    """It would wait for one of its own, and whoever has that may wait for this owner."""
    held = hold_all(pair.decode.node)
    sender, pages = pair.open()
    receiver, target = pair.receive()
    sender.publish(pages, last=True)
    wait_until(lambda: arena(pair.decode.node).slots.is_wanted)
    assert pair.told() == [DEPTH]
    assert_slots_back([pair.owner.node])
    assert receiver.poll() is ReceiverState.PULLING
    give_all(pair.decode.node, held)
    receiver.wait(DEADLINE_S)
    assert pair.decode.pool.find_wrong("t", target) is None
    assert_all([sender], SenderState.RELEASED)
    assert_slots_back([pair.decode.node, pair.owner.node])


def test_a_pull_that_waits_its_turn_holds_none_of_the_owners_slots(
    site: Site, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one in front of it may need them."""
    pace = dataclasses.replace(PACES[MemoryKind.HOST], depth=DEPTH)
    monkeypatch.setitem(PACES, MemoryKind.HOST, pace)
    pair = Pair(site, stack, staging_slots=2 * DEPTH)
    (first, pages), (second, others) = pair.open("a"), pair.open("b")
    one, two = pair.receive("a"), pair.receive("b")
    pair.gate.open.clear()
    first.publish(pages, last=True)
    wait_until(lambda: num_packed(pair.owner) == DEPTH)
    second.publish(others, last=True)
    wait_until(lambda: pair.told("b") == [DEPTH])
    wait_until(lambda: len({one.stamp for one in pair.frames(Staged, "b")}) == DEPTH)
    wait_until(lambda: num_packed(pair.owner) == DEPTH)
    assert pair.frames(Stage, "b") == []
    pair.gate.open.set()
    for (receiver, _), sender in ((one, first), (two, second)):
        receiver.wait(DEADLINE_S)
        assert_all([sender], SenderState.RELEASED)
    assert_slots_back([pair.decode.node, pair.owner.node])


def test_a_pull_that_takes_another_way_gives_the_slots_back(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, pages = pair.open()
    receiver, target = pair.receive()
    chosen = WayChoice(Way.DIRECT, "a test", 0.0, None)
    monkeypatch.setattr(way_picker, "choose_way", lambda *asked: chosen)
    pair.gate.open.clear()
    sender.publish(pages[:3])
    pair.gate.open.set()
    wait_until(lambda: pair.told() == [DEPTH])
    assert_slots_back([pair.owner.node])
    sender.publish(pages[3:], last=True)
    assert set(receiver.wait(DEADLINE_S).ways.values()) == {("direct",)}
    assert pair.decode.pool.find_wrong("t", target) is None
    assert_slots_back([pair.decode.node, pair.owner.node])


def test_a_reader_that_lacks_a_part_only_is_not_staged_for_unasked(pair: Pair) -> None:
    pages = pair.site.scatter(pair.owner.pool, NUM_PAGES)
    sender = pair.owner.open("t", {"kv": pages})
    target = {"kv": pair.site.scatter(pair.decode.pool, NUM_PAGES - 2)}
    receiver = pair.decode.worker.receive(
        "t", pair.site.instance, target, NUM_PAGES * PAGE_SIZE, prefix_tokens=2 * PAGE_SIZE
    )
    wait_until(lambda: bool(sender.attempts()))
    sender.publish(pages[:3])
    sender.publish(pages[3:], last=True)
    receiver.wait(DEADLINE_S)
    assert pair.decode.pool.find_wrong("t", target, {"kv": 2}) is None
    assert pair.told()[0] == 0
    assert_slots_back([pair.decode.node, pair.owner.node])


@pytest.mark.parametrize("how", ["abort", "withdraw"])
def test_a_request_that_ends_with_unasked_pieces_on_the_wire_leaves_no_slot(pair: Pair, how: str) -> None:
    sender, pages = pair.open()
    receiver, _ = pair.receive()
    pair.gate.open.clear()
    sender.publish(pages, last=True)
    wait_until(lambda: num_packed(pair.owner) == DEPTH)
    if how == "abort":
        receiver.abort()
    else:
        sender.withdraw(pages[:1])
        pair.owner.pool.fill("someone else", pair.owner.taken)
    pair.gate.open.set()
    ended = ReceiverState.ABORTED if how == "abort" else ReceiverState.FAILED
    assert finished(receiver).poll() is ended
    assert_all([sender], SenderState.ABORTED)
    assert_slots_back([pair.decode.node, pair.owner.node])
    serve(pair.site, pair.owners, pair.decode)


def test_an_owner_without_free_slots_stages_nothing_unasked(site: Site, stack: contextlib.ExitStack) -> None:
    pair = Pair(site, stack)
    held = hold_all(pair.owner.node)
    sender, pages = pair.open()
    receiver, target = pair.receive()
    sender.publish(pages, last=True)
    wait_until(lambda: pair.told() == [0])
    give_all(pair.owner.node, held)
    receiver.wait(DEADLINE_S)
    assert pair.decode.pool.find_wrong("t", target) is None
    assert_slots_back([pair.decode.node, pair.owner.node])


def test_each_chunk_of_a_request_is_staged_unasked_when_it_comes(pair: Pair) -> None:
    sender, pages = pair.open()
    receiver, target = pair.receive()
    link = pair.decode.worker._links.known(pair.site.instance)
    assert link
    (rank,) = link.ranks.values()
    before = rank.puller.stats.num_pulls
    for start in range(0, NUM_PAGES, 3):
        sender.publish(pages[start : start + 3], last=start + 3 >= NUM_PAGES)
        wait_until(lambda start=start: rank.puller.stats.num_pulls == before + start // 3 + 1)
        wait_until(lambda: rank.puller.is_idle)
        assert_slots_back([pair.owner.node])
    receiver.wait(DEADLINE_S)
    assert pair.decode.pool.find_wrong("t", target) is None
    assert pair.told() == [DEPTH] * (NUM_PAGES // 3)
    assert_slots_back([pair.decode.node, pair.owner.node])


def test_publications_that_were_there_before_the_reader_are_staged_for_it_too(pair: Pair) -> None:
    publish_scattered(pair.site, pair.owners, NUM_PAGES)
    receiver, target = receive(pair.site, pair.decode)
    receiver.wait(DEADLINE_S)
    assert pair.decode.pool.find_wrong("t", target) is None
    assert pair.told() == [DEPTH]
    assert_slots_back([pair.decode.node, pair.owner.node])


def test_an_answer_that_came_before_its_ready_is_not_taken_when_it_is_repeated(pair: Pair) -> None:
    """It went back when it came: by now another piece may lie in its slot."""
    ready: list[Frame] = []
    early: list[Frame] = []
    returned: list[int] = []
    go = threading.Event()

    def to_decode(frame: Frame) -> list[Frame]:
        if go.is_set():
            late, ready[:], early[:] = [*ready, *early], [], []
            return [*late, frame]
        if isinstance(frame.body, Ready):
            ready.extend(() if ready else (frame,))
            return []
        if isinstance(frame.body, Staged):
            early.append(frame)
        return [frame]

    def to_prefill(frame: Frame) -> list[Frame]:
        returned.extend(frame.body.stamps if isinstance(frame.body, Credit) else ())
        return [frame]

    pair.proxy.to_prefill, pair.proxy.to_decode = to_prefill, to_decode
    sender, pages = pair.open()
    receiver, target = pair.receive()
    sender.publish(pages, last=True)
    wait_until(lambda: len(set(returned)) == DEPTH)
    assert_slots_back([pair.owner.node])
    taken = hold_all(pair.owner.node)
    area = arena(pair.owner.node).area
    ctypes.memset(area.address(0), 0xEE, area.num_slots * area.slot_bytes)
    go.set()
    wait_until(lambda: bool(pair.frames(Stage)))
    give_all(pair.owner.node, taken)
    receiver.wait(DEADLINE_S)
    assert pair.decode.pool.find_wrong("t", target) is None
    assert_all([sender], SenderState.RELEASED)
    assert_slots_back([pair.decode.node, pair.owner.node])


def test_an_owner_that_stages_without_end_is_not_remembered_without_end(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.move("usual")
    num_asked = len({one.ticket for one in pair.frames(Stage, "usual")})
    monkeypatch.setattr(live, "MAX_RETURNED", DEPTH)
    sent = False

    def flood(frame: Frame) -> list[Frame]:
        nonlocal sent
        if sent or not isinstance(frame.body, Ready):
            return [frame]
        sent = True
        strange = [Staged(ahead_ticket(7, number), 0, 0, 1, number, 1) for number in range(4 * DEPTH)]
        return [*(dataclasses.replace(frame, body=body) for body in strange), frame]

    pair.proxy.to_decode = flood
    sender, pages = pair.open()
    receiver, target = pair.receive()
    (request,) = [one for one in pair.decode.worker._live.values() if one.receiver is receiver]
    sender.publish(pages, last=True)
    receiver.wait(DEADLINE_S)
    assert len(request.returned) == DEPTH
    assert pair.decode.pool.find_wrong("t", target) is None
    assert len({one.ticket for one in pair.frames(Stage)}) == num_asked + DEPTH, "nothing unasked is taken any more"
    assert_all([sender], SenderState.RELEASED)
    assert_slots_back([pair.decode.node, pair.owner.node])
