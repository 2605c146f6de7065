"""What an engine shows its sidecar of device memory, what the sidecar maps of it, and what either refuses and why.

On GPUs of pretence, which share memory by real file descriptors. `tests/gpu/test_sidecar_gpu.py` has the real ones.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pdlink.backends import cuda_driver, cuda_imports
from pdlink.backends.cuda_facts import PointerFacts
from pdlink.backends.cuda_imports import ImportedEvent
from pdlink.backends.cuda_stream import Stream
from pdlink.backends.cuda_vmm import FdBlock
from pdlink.backends.event_ring import EventRing
from pdlink.backends.ipc_device import share
from pdlink.errors import BackendUnavailable, FrameError, InvalidInput, PeerGone, RegionError
from pdlink.layout.regions import MemoryKind, Region
from pdlink.memory.allocate import allocate
from pdlink.sidecar import wire
from pdlink.sidecar.attach import AttachedPool
from pdlink.sidecar.device_blocks import ROUNDING_BYTES, DeviceBlock, check_dedicated, check_kind, gpu_of, show
from pdlink.v1 import sidecar_pb2 as pb
from tests.pretend_gpu import CUresult
from tests.pretend_vmm import UNIT, PretendVmm, pretend_vmm

PAGE = 4096
GPU_0, GPU_1 = bytes([1]) * 16, bytes([2]) * 16
NAME_0 = "GPU-01010101-0101-0101-0101-010101010101"


@pytest.fixture
def driver() -> Iterator[PretendVmm]:
    with pretend_vmm() as driver:
        yield driver
        assert cuda_imports._IMPORTS == {}


def region(address: int, num_pages: int = 2, device: int = 0) -> Region:
    return Region("latent", 3, address, PAGE, PAGE, num_pages, MemoryKind.CUDA, device)


def attach(regions: list[Region], events: tuple[bytes, ...] = ()) -> AttachedPool:
    """As over the wire, in both directions."""
    shown = show(regions)
    told = wire.pack_pool(regions, wire.PoolTold(os.getpid(), shown.blocks, b"t" * 16, events))

    def take(ticket: bytes, count: int) -> tuple[int, ...]:
        assert (ticket, count) == (b"t" * 16, len(shown.descriptors))
        return shown.descriptors

    return wire.unpack_pool(pb.Pool.FromString(told.SerializeToString()), take)


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_block_by_file_descriptor_is_the_same_memory_at_another_address(driver: PretendVmm) -> None:
    before = num_files()
    block = FdBlock(3 * PAGE, 1)
    assert block.size == UNIT
    pool = attach([region(block.address + PAGE, device=1)])
    (here,) = pool.regions
    assert (here.base_address != block.address + PAGE, here.device, pool.gpu) == (True, 1, GPU_1)
    ctypes.memset(block.address + PAGE, 0x5A, PAGE)
    assert ctypes.string_at(here.base_address, PAGE) == b"\x5a" * PAGE
    assert pool.holds(here)
    assert not pool.can_be_shown
    with pytest.raises(RegionError, match="cannot be shared with a third"):
        share([(1, here.base_address)])
    block.close()
    assert ctypes.string_at(here.base_address, 1) == b"\x5a"
    pool.close()
    pool.close()
    assert (driver.num_handles, driver.blocks, num_files()) == (0, {}, before)


def test_a_block_of_cuda_malloc_is_mapped_by_handle_which_others_are_told_as_well(driver: PretendVmm) -> None:
    block = driver.allocate(4 * PAGE)
    pool = attach([region(block.address), region(block.address + 2 * PAGE)])
    assert [one.base_address for one in pool.regions] == [block.address, block.address + 2 * PAGE]
    assert pool.can_be_shown
    (handle,) = (one.handle for one in show([region(block.address, 4)]).blocks)
    (told,) = share([(0, block.address)])
    assert told.handle != handle
    assert told.handle in driver._shared
    assert (told.uuid, told.nbytes) == (GPU_0.hex(), block.nbytes)
    pool.close()


def test_gpus_are_named_by_uuid_whatever_each_side_counts(driver: PretendVmm) -> None:
    block = FdBlock(PAGE, 0)
    regions = [region(block.address, 1)]
    shown = show(regions)
    assert [one.uuid for one in shown.blocks] == [GPU_0] == [gpu_of(regions)]
    told = wire.pack_pool([replace(regions[0], device=7)], wire.PoolTold(1, shown.blocks))
    assert [one.device for one in told.regions] == [0]
    driver.order = [1, 0]
    cuda_driver.device_uuid.cache_clear()
    pool = AttachedPool([], regions, 1, shown.blocks, shown.descriptors)
    assert [one.device for one in pool.regions] == [1]
    pool.close()
    lie = replace(shown.blocks[0], uuid=GPU_1)
    with pytest.raises(RegionError, match="is on device 1, the engine said 0"):
        AttachedPool([], regions, 1, [lie], show(regions).descriptors)
    block.close()


def test_a_gpu_that_the_sidecar_does_not_see_is_refused_by_name(driver: PretendVmm) -> None:
    block = DeviceBlock(bytes([9]) * 16, 1 << 20, PAGE, bytes(64))
    with pytest.raises(RegionError, match=r"is on GPU-09090909-.* none of the 2 GPUs .*CUDA_VISIBLE_DEVICES"):
        AttachedPool([], [region(1 << 20, 1)], 1, [block])
    with pytest.raises(RegionError, match=f"pages lie on {NAME_0} and GPU-0202.* a worker for each GPU"):
        AttachedPool([], [], 1, [replace(block, uuid=GPU_0), replace(block, uuid=GPU_1)])


def test_without_a_driver_a_device_pool_is_refused_with_what_is_missing() -> None:
    reader, writer = os.pipe()
    os.close(writer)
    try:
        cuda_driver.bindings()
        pytest.skip("there is a driver here")
    except BackendUnavailable:
        pass
    with pytest.raises(RegionError, match=f"{NAME_0}, which is none of the 0 GPUs"):
        AttachedPool([], [], 1, [DeviceBlock(GPU_0, 1 << 20, PAGE)], [reader])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reader)


def test_device_memory_is_allocated_or_refused_with_what_is_missing(driver: PretendVmm) -> None:
    with pytest.raises(InvalidInput, match="at least 1 byte"):
        allocate(0, 0)
    with pytest.raises(BackendUnavailable, match="device 2 is none of the 2 that this process sees"):
        allocate(PAGE, 2)
    driver.cuMemCreate = lambda *rest: (CUresult.CUDA_ERROR_INVALID_VALUE, None)
    with pytest.raises(BackendUnavailable, match=f"device 0 has no {UNIT} bytes to spare"):
        allocate(PAGE, 0)
    driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = None
    cuda_driver.device_attribute.cache_clear()
    driver.cuDeviceGetAttribute = lambda attribute, device: (CUresult.CUDA_SUCCESS, 0 if attribute is None else 4)
    with pytest.raises(BackendUnavailable, match=r"shares no memory by file descriptor.*CUDA IPC"):
        allocate(PAGE, 0)


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (
            PointerFacts(1, 2, is_vmm=True, is_expandable=True),
            r"'latent' layer 3 lies in PyTorch's expandable segments.*: unset expandable_segments in PYTORCH_CUDA_",
        ),
        (PointerFacts(1, 2, is_vmm=True), r"another allocator maps by cuMemMap.*MemPool.*sleep mode"),
        (PointerFacts(1, 2, is_pooled=True), r"cudaMallocAsync.*unset backend:cudaMallocAsync in PYTORCH_CUDA_ALLOC"),
        (PointerFacts(1, 2, has_ipc_handle=True, is_managed=True), r"managed memory.*allocate it with cudaMalloc"),
        (PointerFacts(1, 2), r"CUDA IPC cannot share.*allocate it with cudaMalloc"),
    ],
)
def test_memory_that_cannot_be_shared_is_refused_with_the_setting_to_change(facts: PointerFacts, says: str) -> None:
    with pytest.raises(RegionError, match=says + r".*pdlink\.memory\.allocate"):
        check_kind("'latent' layer 3", facts)


def test_the_driver_is_asked_which_kind_of_memory_a_region_lies_in(driver: PretendVmm) -> None:
    foreign = driver.allocate(4 * PAGE)
    driver.vmm.add(foreign.address)
    driver.facts[foreign.address] = {}
    with pytest.raises(RegionError, match="another allocator maps by cuMemMap"):
        show([region(foreign.address)])
    assert driver.num_handles == 0
    driver.facts[foreign.address] = {"MEMPOOL_HANDLE": 1}
    with pytest.raises(RegionError, match="cudaMallocAsync"):
        show([region(foreign.address)])
    with pytest.raises(RegionError, match="is no memory of device 0"):
        show([region(4096)])


def test_descriptors_are_closed_where_a_pool_is_refused(driver: PretendVmm) -> None:
    before = num_files()
    block = FdBlock(PAGE, 0)
    with pytest.raises(RegionError, match="no memory of device"):
        show([region(block.address, 1), region(4096)])
    block.close()
    assert num_files() == before
    assert driver.num_handles == 0


def test_a_block_that_holds_more_than_the_pool_is_refused_with_both_sizes() -> None:
    start = 16 << 20
    facts = PointerFacts(start, start + (8 << 20), has_ipc_handle=True)
    pages = (8 << 20) // PAGE
    check_dedicated(facts, [region(start, pages)])
    check_dedicated(facts, [region(start + PAGE, 10), region(start, pages - ROUNDING_BYTES // PAGE + 1)])
    small = PointerFacts(start, start + ROUNDING_BYTES, has_ipc_handle=True)
    check_dedicated(small, [region(start, ROUNDING_BYTES // PAGE)])
    with pytest.raises(RegionError, match=rf"block of {ROUNDING_BYTES} bytes with 0 bytes before .* and {PAGE} after"):
        check_dedicated(small, [region(start, ROUNDING_BYTES // PAGE - 1)])
    for first, count, says in (
        (start + PAGE, pages - 1, f"{PAGE} bytes before the pool's pages and 0 after"),
        (start, pages - ROUNDING_BYTES // PAGE, f"0 bytes before the pool's pages and {ROUNDING_BYTES} after"),
    ):
        with pytest.raises(RegionError, match=rf"block of {8 << 20} bytes with {says}.*memory\.allocate"):
            check_dedicated(facts, [region(first, count)])


def test_a_region_outside_its_blocks_or_in_memory_of_the_other_kind_is_refused(driver: PretendVmm) -> None:
    block = FdBlock(UNIT, 0)
    shown = show([region(block.address)])
    with pytest.raises(RegionError, match="in none of the device blocks"):
        AttachedPool([], [region(block.address + UNIT - PAGE)], 1, shown.blocks, shown.descriptors)
    shown = show([region(block.address)])
    on_host = replace(region(block.address), memory=MemoryKind.HOST)
    with pytest.raises(RegionError, match="in none of the shared segments"):
        AttachedPool([], [on_host], 1, shown.blocks, shown.descriptors)
    block.close()
    assert (driver.num_handles, driver.blocks) == (0, {})


def test_what_is_handed_over_must_be_device_memory(driver: PretendVmm) -> None:
    reader, writer = os.pipe()
    os.close(writer)
    with pytest.raises(RegionError, match="no device memory that can be mapped here"):
        AttachedPool([], [], 1, [DeviceBlock(GPU_0, 1 << 20, UNIT)], [reader])
    with pytest.raises(PeerGone, match="may have ended"):
        AttachedPool([], [], 1, [DeviceBlock(GPU_0, 1 << 20, UNIT, bytes(64))])


@pytest.mark.parametrize("nbytes", [0, 15, 17, 36])
def test_a_uuid_of_another_size_is_refused(nbytes: int) -> None:
    message = pb.Pool(blocks=[pb.DeviceBlock(gpu_uuid=bytes(nbytes), nbytes=1, base_address=1)])
    with pytest.raises(RegionError, match=f"named by {nbytes} bytes of UUID, not 16"):
        wire.unpack_pool(message, lambda ticket, count: ())


def test_handles_of_another_size_are_refused() -> None:
    message = pb.Pool(blocks=[pb.DeviceBlock(gpu_uuid=GPU_0, nbytes=1, base_address=1, ipc_handle=bytes(63))])
    with pytest.raises(RegionError, match="has 63 bytes, not 64"):
        wire.unpack_pool(message, lambda ticket, count: ())
    with pytest.raises(FrameError, match="handle of an event has 3 bytes, not 64"):
        wire.unpack_pool(pb.Pool(events=[b"abc"]), lambda ticket, count: ())


class TestEvents:
    """Of a ring that an engine records and its sidecar looks at."""

    def test_an_event_is_over_when_what_it_was_recorded_behind_is(self, driver: PretendVmm) -> None:
        ring, engine = EventRing(0, 2), Stream(0)
        theirs = [ImportedEvent(one, 0) for one in ring.handles]
        done: list[int] = []
        engine.handle.launch(lambda: done.append(1))
        event = driver.cuEventCreate(0)[1]
        driver.cuEventRecord(event, engine.handle)
        slot = ring.record_behind(event)
        assert slot == 0
        assert not theirs[0].query()
        assert theirs[1].query()
        while not theirs[0].query():
            pass
        assert done == [1]
        for one in theirs:
            one.close()
            one.close()
        ring.close()
        ring.close()

    def test_a_slot_is_recorded_anew_when_its_last_record_is_over_and_not_before(self, driver: PretendVmm) -> None:
        ring, engine = EventRing(0, 2), Stream(0)
        engine.handle.launch(lambda: None)
        event = driver.cuEventCreate(0)[1]
        driver.cuEventRecord(event, engine.handle)
        assert [ring.record_behind(event) for _ in range(3)] == [0, 1, None]
        ring._slots[0].stream.handle.run_to(1)
        assert [ring.record_behind(event) for _ in range(2)] == [0, None]
        ring.close()
        assert ring.record_behind(event) is None

    def test_a_pool_brings_its_events_along(self, driver: PretendVmm) -> None:
        ring, block = EventRing(0, 3), driver.allocate(2 * PAGE)
        pool = attach([region(block.address)], ring.handles)
        assert [one.query() for one in pool.events] == [True] * 3
        pool.close()
        assert pool.events == []
        ring.close()


def test_sockets_of_an_engine_have_names_that_are_cleaned_up(tmp_path: Path) -> None:
    from pdlink.sidecar.sockets import ENDS, Place

    place = Place(tmp_path / "a.sock")
    paths = place.engine_paths()
    assert [one.suffix.removeprefix(".") for one in paths] == list(ENDS)
    assert max(len(one.name) for one in paths) - len("a.sock") <= 24
    place.close()
