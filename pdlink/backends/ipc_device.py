"""Owns pulls from a peer's device memory: its allocations as devices here see them, read in place by kernels.

Ranges into own memory are checked by the backend.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Sequence

from pdlink.backends import cuda_driver
from pdlink.backends.cuda_copy import Copying, DeviceCopier
from pdlink.backends.cuda_imports import find_import
from pdlink.backends.ipc_endpoint import IpcEndpoint, SharedAllocation, process_identity
from pdlink.backends.mapped import Mapped, MappedSource
from pdlink.backends.ranges import as_spans
from pdlink.errors import BackendError, BackendUnavailable, PeerGone, RegionError
from pdlink.layout.regions import Region
from pdlink.transfer.descriptors import GroupMove, Int64Array, PullBatch


class Devices:
    """The devices that this process pulls into, each with a copier. Thread-safe; `close` twice is fine."""

    def __init__(self) -> None:
        self._copiers: dict[int, DeviceCopier] = {}
        self._lock = threading.Lock()

    def adopt(self, region: Region) -> None:
        """Get ready for pulls into `region`. Raises `RegionError` unless it is what it says, and can be served."""
        where = f"region of {region.component!r} layer {region.layer}"
        try:
            found = cuda_driver.find_allocation(region.base_address, region.device)
        except BackendUnavailable as error:
            raise RegionError(f"{where} is on a device, which backend ipc cannot serve here: {error}") from error
        if region.end_address > found.stop:
            raise RegionError(
                f"{where} spans {region.base_address:#x}..{region.end_address:#x}, and its allocation ends at "
                f"{found.stop:#x}"
            )
        self.copier(region.device)

    def copier(self, device: int) -> DeviceCopier:
        with self._lock:
            if device not in self._copiers:
                self._copiers[device] = DeviceCopier(device)
            return self._copiers[device]

    def close(self) -> None:
        """Nothing that was launched is under way when this returns."""
        with self._lock:
            copiers, self._copiers = self._copiers, {}
        for copier in copiers.values():
            copier.close()


def share(ranges: Iterable[tuple[int, int]]) -> tuple[SharedAllocation, ...]:
    """The allocations that hold ranges of (device, first address), for others to map.

    Raises `RegionError` where one cannot be shared.
    """
    found = {cuda_driver.find_allocation(start, device) for device, start in ranges}
    return tuple(
        SharedAllocation(cuda_driver.device_uuid(one.device), one.start, one.stop - one.start, _handle(one))
        for one in sorted(found, key=lambda one: one.start)
    )


def _handle(allocation: cuda_driver.Allocation) -> bytes:
    """What was imported is told on as it was told here; the driver would not export it."""
    if found := find_import(allocation.start):
        if found.handle is None or found.address != allocation.start:
            raise RegionError(f"memory {allocation.start:#x} of another process cannot be shared with a third")
        return found.handle
    return cuda_driver.export(allocation)


class DeviceMappings:
    """A peer's allocations, mapped for each device here that reads them, as long as this object lives.

    A peer in this very process is read where its memory lies.
    """

    def __init__(self, worker_id: str, told: IpcEndpoint) -> None:
        self.worker_id = worker_id
        self._shared = told.allocations
        self._spans = as_spans(told.device_spans)
        self._is_own_process = told.process == process_identity()
        self._sources: dict[int, MappedSource] = {}
        """By the device that reads them."""
        self._lock = threading.Lock()

    def reach(self, device: int) -> MappedSource:
        """Map everything for `device`, unless it is. Raises `BackendUnavailable` or `PeerGone`."""
        with self._lock:
            if device not in self._sources:
                opened: list[int] = []
                weakref.finalize(self, _unmap, opened, device).atexit = False
                rows = []
                for one in self._shared:
                    start = self._open(one, device, opened)
                    rows.append((one.start, one.start + one.nbytes, start))
                what = f"device memory of {self.worker_id}"
                self._sources[device] = MappedSource(self.worker_id, what, Mapped.of(rows), self._spans)
            return self._sources[device]

    def start(self, moves: Sequence[GroupMove], own: Int64Array, copier: DeviceCopier) -> Copying:
        """Launch the kernels. `own` are the spans that may be written. Raises `RegionError` before a byte moves."""
        source = self.reach(copier.device)
        here = tuple(source.localised(move, own) for move in moves)
        return copier.start(PullBatch(self.worker_id, here))

    def _open(self, one: SharedAllocation, device: int, opened: list[int]) -> int:
        owner = cuda_driver.find_device(one.uuid)
        if owner is None:
            raise BackendUnavailable(
                f"{self.worker_id} has its memory on a GPU ({one.uuid}) that this process does not see; let both see "
                "both GPUs (CUDA_VISIBLE_DEVICES)"
            )
        if self._is_own_process:
            cuda_driver.open_to(device, owner)
            return one.start
        cuda_driver.check_reach(device, owner)
        try:
            opened.append(cuda_driver.map_exported(one.handle, device))
        except BackendError as error:
            raise PeerGone(
                f"device memory of {self.worker_id} cannot be mapped ({error}); it may have ended"
            ) from error
        return opened[-1]


def _unmap(opened: list[int], device: int) -> None:
    for address in opened:
        with contextlib.suppress(BackendError):  # a device that has failed takes its mappings along
            cuda_driver.unmap(address, device)
