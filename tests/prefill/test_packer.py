"""The packing thread keeps a device busy, takes slots in order, and reports every ticket once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pdlink.backends.copiers import Copier, Prepared
from pdlink.backends.slots import SlotPool
from pdlink.errors import BackendError
from pdlink.layout.regions import MemoryKind
from pdlink.layout.staging import StagingArea
from pdlink.prefill import packer
from pdlink.prefill.packer import MAX_UNDER_WAY, Packer, Ticket
from pdlink.prefill.publication import Publication
from pdlink.prefill.stage_job import StageJob
from pdlink.transfer.descriptors import PullBatch
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.packing import PageTable
from tests.link.rig import DEADLINE_S, wait_until


class Launched:
    """A copy on the device, over when a test says so."""

    def __init__(self, over: bool, fails: bool) -> None:
        self.over = threading.Event()
        self.fails = fails
        if over:
            self.over.set()

    @property
    def is_over(self) -> bool:
        return self.over.is_set()

    def wait(self) -> None:
        assert self.over.wait(DEADLINE_S)
        if self.fails:
            raise BackendError("the device has failed")


@dataclass
class Device(Copier):
    """Launches what it is given. `over`: everything is over at once."""

    over: bool = False
    fails_to_start: int | None = None
    fails: int | None = None
    launched: list[Launched] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    prepared: int = 0
    closed: bool = False
    may_start: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_start.set()

    def prepare(self, batch: PullBatch) -> Prepared:
        self.prepared += 1
        return super().prepare(batch)

    def copy(self, batch: PullBatch, stop: Callable[[], bool]) -> bool:
        raise AssertionError("a device copies beside this thread")

    def start(self, batch: PullBatch) -> Any:
        assert self.may_start.wait(DEADLINE_S)
        number = len(self.launched)
        made = Launched(self.over, number == self.fails)
        self.launched.append(made)
        self.addresses.append(int(batch.moves[0].layers.destination_base[0]))
        if number == self.fails_to_start:
            raise BackendError("nothing can be launched")
        return made

    def close(self) -> None:
        self.closed = True


class Bench:
    """A packer over an area that is never touched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: Device, num_slots: int, timeout_s: float) -> None:
        self.device = device
        self.area = StagingArea(1 << 20, 4096, num_slots, (), MemoryKind.CUDA, 0)
        self.slots = SlotPool(num_slots)
        self.reports: list[tuple[int, Failure | None]] = []
        monkeypatch.setattr(packer, "open_copier", lambda memory, index: device)
        self.packer = Packer("w0", self, timeout_s, time.monotonic, self.done)  # type: ignore[arg-type]
        one = np.array([64], dtype=np.int64)
        self.publication = Publication(0, "kv", 0, np.arange(4, dtype=np.int64), {"latent": (0,)}, 1)
        self.job = StageJob(self.publication, 1, PageTable(one * (1 << 30), one, one), 0, 4, 256)

    def done(self, ticket: Ticket, failure: Failure | None) -> None:
        self.reports.append((ticket.number, failure))

    def put(self, number: int, **changes: Any) -> Ticket:
        ticket = Ticket(("t", 1), number, b"", self.job, time.monotonic(), **changes)
        self.packer.put(ticket)
        return ticket

    def wait_launched(self, number: int) -> None:
        wait_until(lambda: len(self.device.launched) == number)

    def wait_reports(self, *numbers: int) -> None:
        wait_until(lambda: len(self.reports) >= len(numbers))
        assert [number for number, _ in self.reports] == list(numbers)


Make = Callable[..., Bench]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[Bench] = []

    def bench(device: Device, num_slots: int = 4, timeout_s: float = 30.0) -> Bench:
        made.append(Bench(monkeypatch, device, num_slots, timeout_s))
        return made[-1]

    yield bench
    for one in made:
        for launched in one.device.launched:
            launched.over.set()
        one.packer.close()
        assert not one.packer._thread.is_alive
        one.packer.close()


def test_the_next_piece_is_launched_before_the_end_of_the_present_one(make: Make) -> None:
    bench = make(Device(), num_slots=5)
    for number in range(5):
        bench.put(number)
    bench.wait_launched(1)
    bench.device.launched[0].over.set()
    bench.wait_reports(0)
    for number in range(1, 5):
        bench.wait_launched(min(5, number + MAX_UNDER_WAY))
        assert len(bench.device.launched) - len(bench.reports) <= MAX_UNDER_WAY
        bench.device.launched[number].over.set()
        bench.wait_reports(*range(number + 1))
    assert len(set(bench.device.addresses)) == 5


def put_pair(bench: Bench, first: int) -> Ticket:
    """Two pieces for a thread that has nothing to do, the second before it looks for one; returns that."""
    launched = len(bench.device.launched)
    bench.device.may_start.clear()
    bench.put(first)
    second = bench.put(first + 1)
    bench.device.may_start.set()
    bench.wait_launched(launched + 1)
    return second


def test_the_first_of_several_is_reported_before_the_next_is_launched_which_is_ready_then(make: Make) -> None:
    bench = make(Device())
    for round_number in range(2):  # whoever comes after a pause is a first one too
        first = 2 * round_number
        put_pair(bench, first)
        wait_until(lambda: bench.device.prepared == first + 2)  # noqa: B023 - called in this turn
        assert len(bench.device.launched) == first + 1
        bench.device.launched[first].over.set()
        bench.wait_launched(first + 2)
        bench.wait_reports(*range(first + 1))
        bench.device.launched[first + 1].over.set()
        bench.wait_reports(*range(first + 2))


def test_one_that_nobody_wants_any_more_once_it_is_ready_is_not_packed(make: Make) -> None:
    bench = make(Device())
    unwanted = put_pair(bench, 1)
    wait_until(lambda: bench.device.prepared == 2)
    unwanted.over = True
    bench.device.launched[0].over.set()
    bench.wait_reports(1, 2)
    assert len(bench.device.launched) == 1


def test_a_piece_that_is_packed_is_reported_while_the_next_one_waits_for_a_slot(make: Make) -> None:
    bench = make(Device(over=True), num_slots=1)
    first = bench.put(1)
    bench.put(2)
    bench.wait_reports(1)
    wait_until(lambda: bench.slots.is_wanted)
    assert first.slot is not None
    bench.slots.give(first.slot)
    bench.wait_reports(1, 2)


def test_a_ticket_that_brings_its_slot_takes_no_other(make: Make) -> None:
    bench = make(Device(over=True), num_slots=2)
    held = bench.slots.try_take()
    bench.put(1, slot=held)
    bench.wait_reports(1)
    assert bench.slots.num_free == 1
    assert held is not None
    assert bench.device.addresses == [bench.area.address(held)]


def test_a_wait_for_a_slot_ends_with_its_deadline_and_the_next_ticket_has_its_turn(make: Make) -> None:
    bench = make(Device(over=True), num_slots=1, timeout_s=0.05)
    held = bench.slots.try_take()
    bench.put(1)
    bench.wait_reports(1)
    failure = bench.reports[0][1]
    assert failure
    assert failure.reason is FailureReason.TIMEOUT
    bench.put(2, slot=held)
    bench.wait_reports(1, 2)
    assert bench.reports[1][1] is None


def test_what_is_over_is_not_packed_and_gives_up_its_wait(make: Make) -> None:
    bench = make(Device(over=True), num_slots=1)
    held = bench.slots.try_take()
    waiting = bench.put(1)
    wait_until(lambda: bench.slots.is_wanted)
    waiting.over = True
    bench.put(2, slot=held, over=True)
    bench.wait_reports(1, 2)
    assert bench.reports == [(1, None), (2, None)]
    assert bench.device.launched == []


@pytest.mark.parametrize("when", ["fails_to_start", "fails"])
def test_a_device_that_fails_one_piece_ends_that_ticket_alone(make: Make, when: str) -> None:
    bench = make(Device(over=True, **{when: 1}))
    for number in range(3):
        bench.put(number)
    wait_until(lambda: len(bench.reports) == 3)
    failures = dict(bench.reports)
    assert failures[0] is None
    assert failures[2] is None
    assert failures[1]
    assert failures[1].reason is FailureReason.BACKEND


def test_the_thread_ends_when_all_that_was_launched_is_over(make: Make) -> None:
    bench = make(Device())
    bench.put(1)
    bench.wait_launched(1)
    closing = threading.Thread(target=bench.packer.close)
    closing.start()
    assert not bench.device.closed
    bench.device.launched[0].over.set()
    closing.join(DEADLINE_S)
    assert bench.device.closed
    bench.wait_reports(1)
