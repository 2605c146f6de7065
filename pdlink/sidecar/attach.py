"""Owns the memory of an engine's pool as its sidecar has it: which shared segments and device blocks regions lie in,
their mapping here, and the regions at the addresses of this process. It registers nothing and copies nothing.

Memory rules: the engine's memory stays the engine's, which alone ends it. The sidecar writes into it where a receive of
that engine has it write, and reads what the engine has published. It unmaps when the worker is detached.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pdlink.backends import cuda_driver, shm
from pdlink.backends.cuda_imports import ImportedBlock, ImportedEvent
from pdlink.errors import BackendUnavailable, RegionError
from pdlink.layout.regions import MAX_ADDRESS, MemoryKind, Region
from pdlink.sidecar.device_blocks import DeviceBlock, named

MAX_SEGMENTS = 4096
"""Of host memory, and device blocks as well."""
MAX_EVENTS = 256
_OWNER = re.compile(r"pdlink-([0-9]{1,10})-")


@dataclass(frozen=True, slots=True)
class EngineSegment:
    """A segment by its name and size, and the address at which the engine has it."""

    name: str
    nbytes: int
    base_address: int


def segments_of(regions: Iterable[Region]) -> tuple[EngineSegment, ...]:
    """The segments of this process that `regions` in host memory lie in, each once. Raises `RegionError` with what to
    change."""
    found: dict[str, EngineSegment] = {}
    for one in regions:
        if one.memory is not MemoryKind.HOST:
            continue
        place = shm.locate(one.base_address, one.nbytes)
        if place is None:
            raise RegionError(
                f"{named(one)} lies in memory that is private to this process, so that a sidecar cannot map it; "
                "allocate the pool with pdlink.memory.allocate, or open a Node in this process instead of a sidecar's"
            )
        found[place.name] = EngineSegment(place.name, place.nbytes, one.base_address - place.offset)
    return tuple(found.values())


class AttachedPool:
    """An engine's segments and device blocks, mapped for writing. `close` twice is fine.

    `regions` are the engine's at the addresses, and on the devices, of this process. `gpu` is the UUID of the device
    that has blocks, empty where there are none. `events` are those that publications name.
    """

    def __init__(
        self,
        segments: Sequence[EngineSegment],
        regions: Sequence[Region],
        engine_pid: int,
        blocks: Sequence[DeviceBlock] = (),
        descriptors: Sequence[int] = (),
        events: Sequence[bytes] = (),
    ) -> None:
        """Takes `descriptors`, one for each block without a handle, and closes them.

        Raises `RegionError` or `PeerGone`, naming what is refused and what to change, with nothing left mapped.
        """
        self._mapped: list[shm.AttachedSegment | ImportedBlock] = []
        self._regions: list[Region] = []
        self.events: list[ImportedEvent] = []
        with contextlib.ExitStack() as failed:
            failed.callback(self.close)
            for fd in descriptors:
                failed.callback(os.close, fd)
            if len(segments) + len(blocks) > MAX_SEGMENTS:
                text = f"a pool in {len(segments)} shared segments and {len(blocks)} device blocks"
                raise RegionError(f"{text}; at most {MAX_SEGMENTS}: allocate larger ones")
            self.gpu, device = _device_of(blocks)
            for one in segments:
                _check_owner(one, engine_pid)
                self._mapped.append(shm.adopt(one.name, one.nbytes))
            left = iter(descriptors)
            for block in blocks:
                self._mapped.append(
                    ImportedBlock.by_handle(block.handle, block.nbytes, device)
                    if block.handle
                    else ImportedBlock.by_descriptor(next(left), block.nbytes, device)
                )
            self._regions += [_rebased(one, (*segments, *blocks), self._mapped) for one in regions]
            self.events += [ImportedEvent(one, device) for one in events]
            failed.pop_all()
        for fd in descriptors:
            os.close(fd)

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(self._regions)

    @property
    def can_be_shown(self) -> bool:
        """Whether other processes can map all of it, told by this one."""
        return all(not isinstance(one, ImportedBlock) or one.handle for one in self._mapped)

    def holds(self, region: Region) -> bool:
        """Whether `region`, at an address of this process, lies in the engine's memory."""
        return any(
            one.address <= region.base_address and region.end_address <= one.address + one.nbytes
            for one in self._mapped
        )

    def close(self) -> None:
        """Nothing may still copy from or to it."""
        mapped, self._mapped = self._mapped, []
        events, self.events = self.events, []
        self._regions.clear()
        for one in (*events, *mapped):
            one.close()


def _device_of(blocks: Sequence[DeviceBlock]) -> tuple[bytes, int]:
    """The GPU that all of them are on, as this process counts it. Raises `RegionError`."""
    uuids = {one.uuid for one in blocks}
    if not uuids:
        return b"", 0
    names = [cuda_driver.gpu_name(one.hex()) for one in sorted(uuids)]
    if len(uuids) > 1:
        raise RegionError(f"one worker's pages lie on {' and '.join(names)}; attach a worker for each GPU")
    try:
        device = cuda_driver.find_device(next(iter(uuids)).hex())
        count = cuda_driver.num_devices()
    except BackendUnavailable as error:
        raise RegionError(f"the engine's pool is on {names[0]}, and the sidecar can use no GPU: {error}") from error
    if device is None:
        raise RegionError(
            f"the engine's pool is on {names[0]}, which is none of the {count} GPUs that the sidecar sees; let it see "
            "that one (CUDA_VISIBLE_DEVICES where `pdlink sidecar` is started, and the container's devices)"
        )
    return next(iter(uuids)), device


def _check_owner(segment: EngineSegment, engine_pid: int) -> None:
    """An engine brings its own memory, and no other's of the same user."""
    made = _OWNER.match(segment.name)
    if made and int(made[1]) != engine_pid:
        raise RegionError(
            f"shared-memory segment {segment.name} was made by process {made[1]}, and the engine is process "
            f"{engine_pid}; attach each engine's pool from its own process"
        )


def _rebased(
    region: Region,
    told: Sequence[EngineSegment | DeviceBlock],
    mapped: Sequence[shm.AttachedSegment | ImportedBlock],
) -> Region:
    is_on_device = region.memory is MemoryKind.CUDA
    for theirs, ours in zip(told, mapped, strict=True):
        start, stop = theirs.base_address, theirs.base_address + theirs.nbytes
        if is_on_device != isinstance(ours, ImportedBlock):
            continue
        if stop <= MAX_ADDRESS and start <= region.base_address and region.end_address <= stop:
            device = ours.device if isinstance(ours, ImportedBlock) else region.device
            return replace(region, base_address=ours.address + region.base_address - start, device=device)
    kind = "device blocks" if is_on_device else "shared segments"
    raise RegionError(
        f"{named(region)} at {region.base_address:#x}..{region.end_address:#x} lies in none of the {kind} that the "
        "engine has named; allocate the pool with pdlink.memory.allocate"
    )
