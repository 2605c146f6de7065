"""Device memory without a device: whole requests and copies over a driver of pretence, every byte compared."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from pdlink.backends.cuda_copy import NUM_TABLES, DeviceCopier
from pdlink.layout.components import CacheLayout
from pdlink.layout.layer_plan import OwnedLayers
from pdlink.layout.regions import MemoryKind
from pdlink.testing.pattern import PatternPool
from pdlink.transfer.packing import PageTable, pack, pack_runs, unpack, unpack_runs
from pdlink.transfer.states import SenderState
from tests.link.rig import DEADLINE_S, PAGE_SIZE, Site, assert_all, assert_whole, make_layout
from tests.link.staged import assert_slots_back
from tests.pretend_gpu import PretendDriver, pretend_gpus
from tests.transfer.values import ints


@pytest.fixture
def driver(stack: contextlib.ExitStack) -> PretendDriver:
    return stack.enter_context(pretend_gpus())


class PretendSite(Site):
    """Prefill ranks keep their pools on the first device, decode ranks on the second."""

    driver: PretendDriver

    def pool(self, layout: CacheLayout, owned: OwnedLayers, num_pages: int = 16, page_gap: int = 0) -> PatternPool:
        is_decode = all(set(owned.get(one.name, ())) == set(one.layers) for one in layout.components)

        class OnDevice(PatternPool):
            memory = MemoryKind.CUDA
            device = int(is_decode)

        return OnDevice(layout, owned, num_pages, page_gap=page_gap, allocate=self.driver.allocate)


@pytest.mark.parametrize("way", ["mapped", "staged"])
def test_requests_of_any_size_come_whole_by_kernels_alone(
    stack: contextlib.ExitStack, driver: PretendDriver, way: str
) -> None:
    setting = "staged" if way == "staged" else "direct"
    site = PretendSite(stack, backends="ipc", way=setting, staging_slots=3, staging_device_slot_bytes=512 << 10)
    site.driver = driver
    layout = make_layout(5)
    owners = site.prefill(layout, 2, num_pages=40)
    decode = site.decode(layout, num_pages=40, page_gap=64)
    assert {one.memory for one in decode.pool.regions} == {MemoryKind.CUDA}
    for number, num_pages in enumerate((7, 30, 30, 1, 12)):
        name = f"t{number}"
        target = {"kv": site.scatter(decode.pool, num_pages)}
        pages = [site.scatter(owner.pool, num_pages) for owner in owners]
        senders = [owner.open(name, {"kv": ids}) for owner, ids in zip(owners, pages, strict=True)]
        before = driver.num_kernels
        receiver = decode.worker.receive(name, site.instance, target, num_pages * PAGE_SIZE)
        for sender, ids in zip(senders, pages, strict=True):
            sender.publish(ids, last=True)
        result = receiver.wait(DEADLINE_S)
        assert {str(one) for ways in result.ways.values() for one in ways} == {way}
        assert driver.num_kernels >= before + (3 if way == "staged" else 1) * len(owners)
        assert_all(senders, SenderState.RELEASED)
        assert_whole(decode, name, target)
        decode.pool.wipe()
    if way == "staged":
        assert_slots_back([decode.node, *(owner.node for owner in owners)])


class Pages:
    """Rows of pages and a slot on a device of pretence."""

    def __init__(self, driver: PretendDriver, num_rows: int = 3, num_pages: int = 64, page_bytes: int = 132) -> None:
        self.block, self.slot = driver.allocate(num_rows * num_pages * page_bytes), driver.allocate(1 << 16)
        self.pages = self.block.array.reshape(num_rows, num_pages, page_bytes)
        self.pages[:] = np.random.default_rng(3).integers(0, 256, self.pages.shape, dtype=np.uint8)
        size = ints([page_bytes] * num_rows)
        self.table = PageTable(self.block.address + ints(range(num_rows)) * num_pages * page_bytes, size, size)


def test_a_table_that_is_used_again_is_not_written_before_its_kernel_has_read_it(driver: PretendDriver) -> None:
    """Many more launches than tables, none of them waited for, each into a part of the slot of its own."""
    here, copier = Pages(driver, num_rows=1), DeviceCopier(1)
    chosen = [np.random.default_rng(number).permutation(64)[:2] for number in range(4 * NUM_TABLES)]
    under_way = [
        copier.start(pack(pack_runs(one.astype(np.int64)), here.table, here.slot.address + 264 * number))
        for number, one in enumerate(chosen)
    ]
    for number, (one, copying) in enumerate(zip(chosen, under_way, strict=True)):
        copying.wait()
        found = here.slot.array[264 * number : 264 * (number + 1)].reshape(2, 132)
        assert np.array_equal(found, here.pages[0, one])
    copier.close()


def test_copies_that_are_prepared_are_started_later_or_forgotten_and_leave_no_table_taken(
    driver: PretendDriver,
) -> None:
    here, copier = Pages(driver), DeviceCopier(0)
    there = here.pages.copy()
    pages = ints([5, 9, 1, 40])
    packing = copier.prepare(pack(pack_runs(pages), here.table, here.slot.address))
    for _ in range(3 * NUM_TABLES):
        copier.prepare(pack(pack_runs(pages), here.table, here.slot.address + 4096))
    packing.start().wait()
    here.pages[:] = 0
    copier.start(unpack(unpack_runs(pages), (here.table,), here.slot.address)).wait()
    assert np.array_equal(here.pages[:, pages], there[:, pages])
    untouched = np.setdiff1d(np.arange(64), pages)
    assert not here.pages[:, untouched].any()
    assert not here.slot.array[4096:].any()
    copier.close()
    assert len(copier._tables) == NUM_TABLES
