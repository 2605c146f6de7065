"""A staged pull keeps its stages busy at once, uses each slot for one piece at a time, and gives everything back."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlink.backends.base import PullHandle, PullStatus
from pdlink.backends.copiers import Copier, Copying, HostCopier
from pdlink.backends.staging import Arena
from pdlink.config import Settings
from pdlink.control.frames import Body, Credit, Stage, Staged
from pdlink.decode import owner_slots, staging_link
from pdlink.decode.actions import Pull
from pdlink.decode.stage_inbox import StageInbox
from pdlink.decode.staged_pull import StagedPull
from pdlink.decode.staging_link import Pace, StagingLink
from pdlink.errors import BackendError
from pdlink.layout.regions import MemoryKind
from pdlink.layout.staging import StagingArea
from pdlink.transfer.ahead import Ahead, ahead_ticket
from pdlink.transfer.descriptors import GroupMove, LayerTable, PullBatch, pair_pages
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.packing import PageTable, cut, pack, pack_runs
from pdlink.transfer.timings import PullTimings
from tests.link.rig import wait_until

PAGE_BYTES = 512
NUM_LAYERS = 4
NUM_PAGES = 16
KEY = ("t", 7)


def address_of(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@dataclass
class Script:
    """What a pull meets, step by step: every number says how many looks a stage takes. `fail` ends it at some stage."""

    pack: list[int] = field(default_factory=list)
    wire: list[int] = field(default_factory=list)
    unpack: list[int] = field(default_factory=list)
    fail: tuple[str, int] | None = None

    def looks(self, stage: str, number: int) -> int:
        steps: list[int] = getattr(self, stage)
        return steps[number % len(steps)] if steps else 0

    def fails(self, stage: str, number: int) -> bool:
        return self.fail == (stage, number)


class World:
    """An owner, a wire and a copier over real memory of this process, which move only when the pull looks at them."""

    def __init__(self, script: Script, num_slots: int, slot_bytes: int = NUM_PAGES * PAGE_BYTES) -> None:
        rng = np.random.default_rng(1)
        self.script = script
        self.source = rng.integers(0, 256, (NUM_LAYERS, NUM_PAGES, PAGE_BYTES), dtype=np.uint8)
        self.target = np.zeros((NUM_LAYERS, NUM_PAGES, PAGE_BYTES), dtype=np.uint8)
        self.source_pages, self.pages = rng.permutation(NUM_PAGES), rng.permutation(NUM_PAGES)
        self.owner_slots = np.zeros((num_slots, slot_bytes), dtype=np.uint8)
        self.owner_free = list(range(num_slots))
        self.arena = Arena(num_slots, slot_bytes, (), shared=False)
        self.area = StagingArea(address_of(self.owner_slots), slot_bytes, num_slots)
        self.inbox = Inbox(self)
        self.link = StagingLink(self.arena, self.area, self.inbox, Settings())
        self.asked: list[tuple[Stage, int]] = []
        """Stages that the owner packs, and how many looks it still takes."""
        self.tickets: set[int] = set()
        self.granted: dict[int, int] = {}
        """Stamp -> slot of the owner, until its credit comes."""
        self.on_wire: dict[int, PullHandle] = {}
        self.copyings: list[Unpacking] = []
        self.numbers = {stage: itertools.count() for stage in ("pack", "wire", "unpack")}
        self.waits: list[tuple[int, int]] = []
        self.pairs: list[tuple[int, int]] = []
        """The slots of the owner and of here, of what was posted."""
        """(pieces ever asked for, pieces that the owner still has to pack or holds packed) whenever the pull waited."""
        self.num_asked = 0
        self.num_sent = 0
        """Times that the pull sent something."""
        self.on_credit: Callable[[], None] = lambda: None
        self.seen: set[tuple[bool, bool, bool]] = set()
        """(something is packed, on the wire, unpacked) at once, whenever the pull looked."""

    def run(self, stop: Callable[[], bool] = lambda: False, ahead: Ahead | None = None) -> Failure | None:
        order = np.arange(NUM_LAYERS, dtype=np.int64)
        stride = np.full(NUM_LAYERS, PAGE_BYTES, dtype=np.int64)
        layers = LayerTable(order, *self._columns(self.source), *self._columns(self.target), stride)
        batch = PullBatch("w0", (GroupMove("kv", pair_pages(self.source_pages, self.pages), layers),))
        cells = tuple(("latent", layer) for layer in range(NUM_LAYERS))
        pull = Pull("w0", 1, batch, "kv", order, self.pages, None, cells, 0, 3, 0)
        calls = (self.send, stop, self)
        cut = self.link.cut(pull, ahead)
        for number in range(ahead.num_pieces if ahead else 0):
            piece, ticket = cut.pieces[number], ahead_ticket(0, number)
            self.inbox.expect(KEY, ticket)
            body = Stage(ticket, 0, piece.first_page, piece.num_pages, cut.layers[number])
            self.asked.append((body, self.script.looks("pack", next(self.numbers["pack"]))))
        copier = ScriptedCopier(self)
        staged = StagedPull(self.link, pull, KEY, itertools.count(1), *calls, PullTimings(), copier, ahead)
        failure = staged.run()
        if staged.owed:
            self.send(staged.owed)
        return failure

    def _columns(self, pool: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        base = address_of(pool) + np.arange(NUM_LAYERS, dtype=np.int64) * pool.strides[0]
        return base, np.full(NUM_LAYERS, PAGE_BYTES, dtype=np.int64)

    # the owner

    def send(self, *bodies: Body) -> None:
        self.num_sent += 1
        for body in bodies:
            if isinstance(body, Stage):
                if body.ticket in self.tickets:
                    continue  # asked again, because this machine was slow: an owner packs it once
                self.tickets.add(body.ticket)
                self.num_asked += 1
                self.asked.append((body, self.script.looks("pack", next(self.numbers["pack"]))))
            elif isinstance(body, Credit):
                for slot, stamp in zip(body.slots, body.stamps, strict=True):
                    assert self.granted.pop(stamp) == slot, "a slot was given back twice"
                    self.owner_slots[slot] = 0xEE  # whoever still reads it reads this
                    self.owner_free.append(slot)
                self.on_credit()

    def pack_some(self) -> None:
        self.note()
        if self.asked and self.owner_free:
            body, looks = self.asked.pop(0)
            if looks:
                self.asked.insert(0, (body, looks - 1))
                return
            slot = self.owner_free.pop(0)
            base, stride = self._columns(self.source)
            rows = list(body.layers["latent"])
            table = PageTable(base[rows], stride[rows], stride[rows])
            pages = self.source_pages[body.first_page : body.first_page + body.num_pages]
            HostCopier().copy(pack(pack_runs(pages), table, self.area.address(slot)), lambda: False)
            nbytes = len(rows) * body.num_pages * PAGE_BYTES
            self.granted[100 + body.ticket] = slot
            generation = 99 if self.script.fails("pack", body.ticket - 1) else 3
            offset = slot * self.area.slot_bytes
            if not self.inbox.put(KEY, Staged(body.ticket, slot, offset, nbytes, 100 + body.ticket, generation)):
                self.send(Credit((slot,), (100 + body.ticket,)))

    def note(self) -> None:
        unpacking = any(not one.over for one in self.copyings)
        self.seen.add((bool(self.asked), bool(self.on_wire), unpacking))

    # the wire

    def start(self, batch: PullBatch) -> PullHandle:
        number = next(self.numbers["wire"])
        if self.script.fails("start", number):
            raise BackendError("the link is down")
        handle = OnWire(batch, self.script.looks("wire", number), self.script.fails("wire", number))
        self.on_wire[id(handle)] = handle
        (move,) = batch.moves
        self.pairs.append((int(move.runs.source[0]), int(move.runs.destination[0])))
        assert len(self.on_wire) <= self.link.pace.num_posted
        return handle

    def look(self, handle: PullHandle) -> PullStatus | Failure:
        assert isinstance(handle, OnWire)
        self.pack_some()
        if handle.looks:
            handle.looks -= 1
            return PullStatus.PENDING
        del self.on_wire[id(handle)]
        if handle.fails:
            return Failure(FailureReason.BACKEND, "the link is down", "w0")
        HostCopier().copy(handle.batch, lambda: False)
        return PullStatus.DONE

    def nap(self, nap_s: float) -> None:
        self.waits.append((self.num_asked, len(self.asked) + len(self.granted)))
        self.pack_some()

    def finish(self, handle: PullHandle) -> Failure | None:
        raise AssertionError("the pieces of one pull do not wait for each other")

    def drop(self, handle: PullHandle) -> None:
        del self.on_wire[id(handle)]

    # afterwards

    def assert_all_back(self) -> None:
        assert self.arena.slots.num_free == self.arena.slots.num_slots
        assert not self.on_wire
        assert all(one.over for one in self.copyings)
        assert not self.granted, "the owner's slots were not all given back"

    def assert_whole(self) -> None:
        assert np.array_equal(self.target[:, self.pages], self.source[:, self.source_pages])


class OnWire(PullHandle):
    def __init__(self, batch: PullBatch, looks: int, fails: bool) -> None:
        super().__init__(batch)
        self.looks = looks
        self.fails = fails


class Unpacking:
    """A copy that is made when it has been looked at often enough, or is waited for."""

    def __init__(self, world: World, batch: PullBatch, looks: int, fails: bool) -> None:
        self.world, self.batch, self.looks, self.fails, self.over = world, batch, looks, fails, False

    @property
    def is_over(self) -> bool:
        self.world.pack_some()
        if self.looks:
            self.looks -= 1
        else:
            self.make()
        return self.over

    def wait(self) -> None:
        self.make()
        if self.fails:
            raise BackendError("the device has failed")

    def make(self) -> None:
        if not self.over:
            self.over = True
            HostCopier().copy(self.batch, lambda: False)


class ScriptedCopier(Copier):
    def __init__(self, world: World) -> None:
        self.world = world

    def copy(self, batch: PullBatch, stop: Callable[[], bool]) -> bool:
        raise AssertionError("a pull does not wait for a copy while it could do something else")

    def start(self, batch: PullBatch) -> Copying:
        number, script = next(self.world.numbers["unpack"]), self.world.script
        made = Unpacking(self.world, batch, script.looks("unpack", number), script.fails("unpack", number))
        self.world.copyings.append(made)
        return made


class Inbox(StageInbox):
    """Never waits: the owner packs instead."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def wait(self, key: tuple[str, int], tickets: Collection[int], timeout_s: float) -> bool:
        self.world.waits.append((self.world.num_asked, len(self.world.asked) + len(self.world.granted)))
        self.world.pack_some()
        return super().wait(key, tickets, 0)


@contextmanager
def world(
    script: Script,
    depth: int,
    num_pieces: int = 8,
    slots: int = 0,
    slot_bytes: int = NUM_PAGES * PAGE_BYTES,
    num_posted: int = 2,
) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(staging_link.PACES, MemoryKind.HOST, Pace(depth, num_pieces, 1, num_posted))
        made = World(script, slots or depth, slot_bytes)
        try:
            yield made
        finally:
            made.arena.close()


LOOKS = st.lists(st.integers(0, 4), min_size=1, max_size=5)
SCRIPTS = st.builds(Script, LOOKS, LOOKS, LOOKS)
STAGES = st.sampled_from(["pack", "start", "wire", "unpack"])


@given(SCRIPTS, st.integers(1, 5), st.integers(1, 12), st.integers(1, 5), st.integers(1, 5))
@settings(deadline=None)
def test_every_page_arrives_whichever_stage_is_slow(
    script: Script, depth: int, num_pieces: int, slots: int, num_posted: int
) -> None:
    with world(script, depth, num_pieces, slots, num_posted=num_posted) as made:
        assert made.run() is None
        made.assert_whole()
        made.assert_all_back()


@given(SCRIPTS, st.integers(1, 5), STAGES, st.integers(0, 3))
@settings(deadline=None)
def test_a_failure_at_any_stage_ends_the_pull_when_all_is_quiet_and_given_back(
    script: Script, depth: int, stage: str, number: int
) -> None:
    script.fail = (stage, number)
    with world(script, depth) as made:
        if stage in ("start", "unpack"):
            with pytest.raises(BackendError, match=r"link is down|device has failed"):
                made.run()
        else:
            assert made.run() is not None
        made.assert_all_back()


@given(SCRIPTS, st.integers(1, 4), st.integers(0, 40))
@settings(deadline=None)
def test_a_pull_that_is_stopped_at_any_time_ends_when_all_is_quiet_and_given_back(
    script: Script, depth: int, after: int
) -> None:
    with world(script, depth) as made:
        looked = itertools.count()
        failure = made.run(lambda: next(looked) >= after)
        if failure is None:
            made.assert_whole()
        else:
            assert failure.reason is FailureReason.ABORTED
        made.assert_all_back()


def test_with_slots_for_it_the_owner_packs_while_one_piece_is_on_the_wire_and_another_is_unpacked() -> None:
    with world(Script(pack=[6], wire=[6], unpack=[6]), depth=4) as made:
        assert made.run() is None
        assert (True, True, True) in made.seen


def test_a_slow_unpack_does_not_keep_the_next_piece_off_the_wire() -> None:
    """With two slots: the second piece lands while the first one is unpacked."""
    with world(Script(wire=[3], unpack=[50]), depth=2) as made:
        assert made.run() is None
        assert (False, True, True) in made.seen
        made.assert_whole()


@given(SCRIPTS, st.integers(1, 4), st.integers(1, 4))
@settings(deadline=None)
def test_while_pieces_are_left_the_owner_always_has_as_many_to_work_on_as_the_pace_says(
    script: Script, depth: int, slots: int
) -> None:
    with world(script, depth, num_pieces=8, slots=slots) as made:
        assert made.run() is None
        total = made.num_asked
        assert made.waits
        assert all(held == depth for asked, held in made.waits if asked < total)


def test_what_lies_in_a_slot_of_the_owner_comes_to_the_own_one_of_that_number() -> None:
    with world(Script(wire=[2], unpack=[1]), depth=3, num_posted=3) as made:
        assert made.run() is None
        assert {one for one, _ in made.pairs} == {0, 1, 2}
        assert all(one == other for one, other in made.pairs)


@pytest.mark.parametrize("num_pages", [128, 512])
def test_the_last_of_few_pieces_is_the_shortest(num_pages: int) -> None:
    pace, page_bytes, slot_bytes = Pace(4, 4, 32 << 20), np.full(39, 41984, dtype=np.int64), 256 << 20
    pieces = cut(page_bytes, num_pages, pace.piece_bytes(page_bytes, num_pages, slot_bytes))
    sizes = [one.nbytes for one in pieces]
    assert len(set(sizes[:3])) == 1
    assert sizes[0] <= slot_bytes
    assert 0.4 * sizes[0] < sizes[3] < 0.6 * sizes[0]


def test_one_own_slot_is_enough_for_the_owner_to_pack_ahead() -> None:
    """What is asked for waits at the owner until the slot is free again, which needs nobody else."""
    with world(Script(wire=[9], unpack=[9]), depth=3, slots=3) as made:
        held = [made.arena.slots.try_take() for _ in range(2)]
        assert made.run() is None
        assert (6, 3) in [(asked, len_held) for asked, len_held in made.waits]
        for slot in held:
            assert slot is not None
            made.arena.slots.give(slot)
        made.assert_whole()
        made.assert_all_back()


@pytest.mark.parametrize("slots", [1, 3])
def test_a_long_pull_lets_others_have_its_slots_in_between(slots: int) -> None:
    with world(Script(wire=[2], unpack=[2]), depth=3, slots=slots) as made:
        pool, over, got = made.arena.slots, threading.Event(), threading.Event()
        held = [pool.try_take() for _ in range(slots - 1)]

        def want() -> None:
            slot = pool.take(30.0, lambda: False)
            assert slot is not None
            if not over.is_set():
                got.set()
            pool.give(slot)

        other = threading.Thread(target=want)

        def begin() -> None:
            if not other.ident:
                other.start()
                wait_until(lambda: pool.is_wanted)

        made.on_credit = begin
        assert made.run() is None
        over.set()
        other.join(30.0)
        assert got.is_set()
        for slot in held:
            assert slot is not None
            pool.give(slot)
        made.assert_whole()
        made.assert_all_back()


AHEAD = st.builds(Ahead, st.integers(PAGE_BYTES, 2 * NUM_PAGES * PAGE_BYTES), st.integers(1, 2))


@given(SCRIPTS, st.integers(1, 4), st.integers(1, 4), AHEAD)
@settings(deadline=None)
def test_what_is_staged_unasked_is_taken_over_and_the_rest_is_asked_for(
    script: Script, depth: int, slots: int, ahead: Ahead
) -> None:
    with world(script, depth, slots=slots, slot_bytes=2 * NUM_PAGES * PAGE_BYTES) as made:
        assert made.run(ahead=ahead) is None
        made.assert_whole()
        made.assert_all_back()
        assert made.num_asked == next(made.numbers["wire"]) - ahead.num_pieces


@given(SCRIPTS, st.integers(1, 4), AHEAD, st.integers(0, 40))
@settings(deadline=None)
def test_a_pull_that_is_stopped_gives_back_what_was_staged_unasked(
    script: Script, depth: int, ahead: Ahead, after: int
) -> None:
    with world(script, depth, slot_bytes=2 * NUM_PAGES * PAGE_BYTES) as made:
        looked = itertools.count()
        made.run(lambda: next(looked) >= after, ahead)
        while made.asked:
            made.pack_some()
        made.assert_all_back()


def test_a_pull_without_an_own_slot_gives_back_what_was_staged_unasked_before_it_waits() -> None:
    with world(Script(), depth=2, slot_bytes=2 * NUM_PAGES * PAGE_BYTES) as made:
        held = [made.arena.slots.try_take() for _ in range(2)]
        looked: list[int] = []

        def stop() -> bool:
            while made.asked:
                made.pack_some()
            looked.append(len(made.granted))
            return len(looked) > 2

        failure = made.run(stop, Ahead(NUM_PAGES * PAGE_BYTES, 2))
        assert failure
        assert set(looked) == {0}
        for slot in held:
            assert slot is not None
            made.arena.slots.give(slot)
        made.assert_all_back()


def test_credits_go_with_the_next_question_and_the_last_ones_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every frame costs the thread that pulls a turn of the interpreter."""
    monkeypatch.setattr(owner_slots, "OWE_S", 60.0)  # on a busy machine a while may pass between two pieces
    with world(Script(wire=[3]), depth=4, num_pieces=8, slots=4) as made:
        assert made.run(ahead=Ahead(NUM_PAGES * PAGE_BYTES // 2, 4)) is None
        assert made.num_asked == 4
        assert made.num_sent <= 5
        made.assert_whole()
        made.assert_all_back()


def test_a_slot_that_the_pull_does_not_need_again_goes_back_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_slots, "OWE_S", 0.0)
    with world(Script(wire=[0, 500]), depth=4, num_pieces=2, slot_bytes=2 * NUM_PAGES * PAGE_BYTES) as made:
        given: list[int] = []
        made.on_credit = lambda: given.append(len(made.on_wire))
        assert made.run() is None
        assert given[0] == 1  # while the other one is on the wire
        made.assert_all_back()
