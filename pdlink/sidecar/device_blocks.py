"""Owns what an engine shows its sidecar of pools in device memory: which blocks regions lie in, by what each is shared,
and the refusal of memory that cannot be, with what to change. It maps nothing.

A device is named by its UUID: ordinals depend on CUDA_VISIBLE_DEVICES, which both ends have of their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdlink.backends import cuda_driver, cuda_facts, cuda_vmm
from pdlink.backends.cuda_facts import PointerFacts
from pdlink.errors import RegionError
from pdlink.layout.regions import MemoryKind, Region

UUID_BYTES = 16
ROUNDING_BYTES = 2 << 20
"""PyTorch's allocator rounds the block of a large tensor up to a multiple of it, and puts small ones into such blocks.
"""
SMALL_ROUNDING_BYTES = 512
"""Of the tensors in such a block."""
ALLOCATE = "allocate the pool with pdlink.memory.allocate(nbytes, device)"


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """`nbytes` bytes of the GPU `uuid`, and the address at which the engine has them.

    `handle` is its CUDA IPC handle; empty where it is shared by a file descriptor, which is handed over.
    """

    uuid: bytes
    base_address: int
    nbytes: int
    handle: bytes = b""

    def __post_init__(self) -> None:
        """Raises `RegionError`."""
        if len(self.uuid) != UUID_BYTES:
            raise RegionError(f"a GPU is named by {len(self.uuid)} bytes of UUID, not {UUID_BYTES}")
        if len(self.handle) not in (0, cuda_driver.HANDLE_BYTES):
            raise RegionError(f"a CUDA IPC handle has {len(self.handle)} bytes, not {cuda_driver.HANDLE_BYTES}")


@dataclass(frozen=True, slots=True)
class Shown:
    """The blocks of a pool, and a file descriptor for each that has no handle, in order. Somebody closes those."""

    blocks: tuple[DeviceBlock, ...] = ()
    descriptors: tuple[int, ...] = ()

    def close(self) -> None:
        for fd in self.descriptors:
            os.close(fd)


def show(regions: Iterable[Region]) -> Shown:
    """The device blocks that `regions` lie in, each once. Raises `RegionError` with what to change."""
    blocks: dict[tuple[int, int], DeviceBlock] = {}
    descriptors: list[int] = []
    inside: dict[tuple[int, int], tuple[PointerFacts, list[Region]]] = {}
    try:
        for one in regions:
            if one.memory is not MemoryKind.CUDA:
                continue
            uuid = bytes.fromhex(cuda_driver.device_uuid(one.device))
            if ours := cuda_vmm.find_block(one.base_address):
                if (one.device, ours.address) not in blocks:
                    descriptors.append(ours.export())
                    blocks[one.device, ours.address] = DeviceBlock(uuid, ours.address, ours.size)
                continue
            facts = cuda_facts.look_at(one.base_address, one.device)
            key = one.device, facts.start
            if key not in blocks:
                check_kind(named(one), facts)
                handle = cuda_driver.export(cuda_driver.Allocation(facts.start, facts.stop, one.device))
                blocks[key] = DeviceBlock(uuid, facts.start, facts.stop - facts.start, handle)
            inside.setdefault(key, (facts, []))[1].append(one)
        for facts, lying in inside.values():
            if not cuda_driver.is_own_block(facts.start):
                check_dedicated(facts, lying)
    except BaseException:
        Shown(descriptors=tuple(descriptors)).close()
        raise
    return Shown(tuple(blocks.values()), tuple(descriptors))


def gpu_of(regions: Iterable[Region]) -> bytes:
    """The UUID of the GPU that regions are on; empty where none is on any. Raises `RegionError` for several."""
    devices = sorted({one.device for one in regions if one.memory is MemoryKind.CUDA})
    if len(devices) > 1:
        raise RegionError(f"one worker's pages lie on devices {devices}; give each GPU a worker of its own")
    return bytes.fromhex(cuda_driver.device_uuid(devices[0])) if devices else b""


def named(region: Region) -> str:
    return f"{region.component!r} layer {region.layer}"


def check_kind(what: str, facts: PointerFacts) -> None:
    """Raise `RegionError` unless CUDA IPC can share memory of that kind."""
    if facts.has_ipc_handle and not facts.is_managed:
        return
    if facts.is_expandable:
        why = "PyTorch's expandable segments"
        fix = "unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF (PYTORCH_ALLOC_CONF)"
    elif facts.is_managed:
        why, fix = "managed memory (cudaMallocManaged)", "allocate it with cudaMalloc"
    elif facts.is_pooled:
        why = "a memory pool of the driver (cudaMallocAsync)"
        fix = (
            "unset backend:cudaMallocAsync in PYTORCH_CUDA_ALLOC_CONF (PYTORCH_ALLOC_CONF), or allocate with cudaMalloc"
        )
    elif facts.is_vmm:
        why = "memory that another allocator maps by cuMemMap"
        fix = "turn that allocator off for the pool (for PyTorch a MemPool or expandable_segments, for vLLM sleep mode)"
    else:
        why, fix = "memory that the driver says CUDA IPC cannot share", "allocate it with cudaMalloc"
    raise RegionError(f"{what} lies in {why}, which no sidecar can map: {fix}; or {ALLOCATE}")


def check_dedicated(facts: PointerFacts, regions: Sequence[Region]) -> None:
    """Raise `RegionError` where the block of `regions` has room for more than them: CUDA IPC shares all of it."""
    first = min(regions, key=lambda one: one.base_address)
    before = first.base_address - facts.start
    after = facts.stop - max(one.end_address for one in regions)
    is_small = facts.stop - facts.start == ROUNDING_BYTES
    if before or after >= (SMALL_ROUNDING_BYTES if is_small else ROUNDING_BYTES):
        raise RegionError(
            f"{named(first)} lies in a block of {facts.stop - facts.start} bytes with {before} bytes before the pool's "
            f"pages and {after} after them, and CUDA IPC would show those to the sidecar as well: give the pool "
            f"tensors that have a block each (of 10 MiB and more with PyTorch's allocator, from their first byte), or "
            f"{ALLOCATE}"
        )
