"""A session of an engine whose pools are on GPUs: one GPU a process, over what pages may be read, events of a ring.

On GPUs of pretence, engine and sidecar in one process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import pytest

from pdlink.backends.cuda_vmm import FdBlock
from pdlink.backends.event_ring import EventRing
from pdlink.config import load_settings
from pdlink.errors import InvalidInput
from pdlink.layout.regions import MemoryKind, Region
from pdlink.runtime.node import Node
from pdlink.sidecar import wire
from pdlink.sidecar.device_blocks import show
from pdlink.sidecar.session import Session
from pdlink.v1 import sidecar_pb2 as pb
from tests.pretend_vmm import PretendVmm, pretend_vmm
from tests.processes import wait_until
from tests.sidecar.rig import NUM_PAGES, make_layout, make_pool, prefill_rank

TICKET = b"t" * 16


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


class Desk:
    """A session, and the engine's end of it."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.driver: PretendVmm = stack.enter_context(pretend_vmm())
        self.told: list[pb.SidecarMessage] = []
        self.handed: list[int] = []
        settings = {"backends": "ipc", "way": "staged", "staging_slots": 1, "staging_device_slot_bytes": 1 << 16}
        self.node = Node(load_settings({}, **settings))
        self.session = Session(self.node, self.told.append, self._take)
        stack.callback(self.session.end, "the test is over")
        self._calls = 0

    def ask(self, **body: object) -> pb.Answer:
        """Say something and wait for the answer."""
        self._calls += 1
        call = self._calls
        self.session.hear(pb.EngineMessage(call=call, **body))  # type: ignore[arg-type]
        found: list[pb.Answer] = []

        def is_there() -> bool:
            found[:] = [one.answer for one in self.told if one.HasField("answer") and one.answer.call == call]
            return bool(found)

        assert wait_until(is_there)
        return found[0]

    def attach(self, worker: int, regions: Sequence[Region], events: Sequence[bytes] = ()) -> pb.Answer:
        shown = show(regions)
        self.handed = list(shown.descriptors)
        pool = type("Pool", (), {"regions": regions})()
        told = wire.PoolTold(os.getpid(), shown.blocks, TICKET if shown.descriptors else b"", events)
        return self.ask(attach_prefill=wire.pack_prefill(worker, prefill_rank(pool, f"instance-{worker}"), [], told))

    def regions(self, form: str, device: int = 0) -> list[Region]:
        made = []
        for component in make_layout().components:
            for layer in component.layers:
                nbytes = NUM_PAGES * component.page_bytes
                address = (
                    FdBlock(nbytes, device).address if form == "descriptor" else self.driver.allocate(nbytes).address
                )
                shape = (address, component.page_bytes, component.page_bytes, NUM_PAGES, MemoryKind.CUDA, device)
                made.append(Region(component.name, layer, *shape))
        return made

    def staged_only(self, worker: int) -> frozenset[str]:
        return self.session._prefill[worker].registration().rank.staged_only

    def _take(self, ticket: bytes, count: int) -> Sequence[int]:
        assert count == len(self.handed)
        handed, self.handed = self.handed, []
        return handed


def test_pages_that_nobody_else_can_map_are_read_staged_over_every_transport(stack: contextlib.ExitStack) -> None:
    desk = Desk(stack)
    assert not desk.attach(1, desk.regions("descriptor")).HasField("error")
    assert not desk.attach(2, desk.regions("handle")).HasField("error")
    assert desk.staged_only(1) == {"ipc"}
    assert desk.staged_only(2) == frozenset()
    areas = [desk.session._prefill[worker].registration().rank.staging for worker in (1, 2)]
    assert [(area.memory, area.backends) for area in areas if area] == [(MemoryKind.CUDA, ("ipc",))] * 2


def test_one_process_serves_one_gpu(stack: contextlib.ExitStack) -> None:
    desk = Desk(stack)
    assert not desk.attach(1, desk.regions("descriptor", 1)).HasField("error")
    others = make_pool()
    stack.callback(others.close)
    for number, regions, name in ((2, desk.regions("descriptor", 0), "GPU-0101"), (3, others.regions, "the host")):
        refused = desk.attach(number, regions)
        assert "serves pools of GPU-02020202-" in refused.error.text
        assert f"worker {number}'s is of {name}" in refused.error.text
    assert not desk.attach(4, desk.regions("descriptor", 1)).HasField("error")


def test_a_publication_waits_for_its_event_and_one_that_is_none_of_the_pool_ends_the_request(
    stack: contextlib.ExitStack,
) -> None:
    desk = Desk(stack)
    ring, engine = EventRing(0, 2), desk.driver.cuStreamCreateWithPriority(0, 0)[1]
    stack.callback(ring.close)
    assert not desk.attach(1, desk.regions("handle"), ring.handles).HasField("error")
    event = desk.driver.cuEventCreate(0)[1]
    engine.launch(lambda: None)
    desk.driver.cuEventRecord(event, engine)
    slot = ring.record_behind(event)
    desk.ask(open=pb.OpenSender(worker=1, sender=7, transfer_id="good"))
    desk.session.hear(publish(7, event=slot))
    sender = desk.session._senders[7]
    assert wait_until(lambda: len(sender._publications) == 1)
    assert engine.num_done == 1
    desk.ask(open=pb.OpenSender(worker=1, sender=8, transfer_id="bad"))
    bad = desk.session._senders[8]
    desk.session.hear(publish(8, event=2))
    assert "worker 1 has no event 2" in str(bad.failure)


def publish(sender: int, event: int | None) -> pb.EngineMessage:
    pages = wire.pack_pages([0, 1])
    return pb.EngineMessage(publish=pb.PublishPages(worker=1, sender=sender, group="kv", page_ids=pages, event=event))


def test_a_pool_goes_with_its_worker(stack: contextlib.ExitStack) -> None:
    desk = Desk(stack)
    regions = desk.regions("descriptor")
    before = desk.driver.num_handles, len(desk.driver.vmm)
    assert not desk.attach(1, regions).HasField("error")
    assert len(desk.driver.vmm) == 2 * before[1]
    assert desk.ask(detach=pb.Detach(worker=1)).quiet
    assert (desk.driver.num_handles, len(desk.driver.vmm)) == before
    with pytest.raises(InvalidInput):
        desk.session._event(pb.PublishPages(worker=1, event=0))
