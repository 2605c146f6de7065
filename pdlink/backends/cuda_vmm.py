"""Owns device memory that other processes map by file descriptor (CUDA's virtual memory management): the blocks of this
process, which of them holds an address, and the reserving and mapping that both ends need.

A block is one physical allocation, mapped once. Its file descriptor, wherever it goes, keeps the memory alive.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from pdlink.backends.cuda_driver import bindings, call, constant, device_attribute, on_device
from pdlink.errors import BackendError, BackendUnavailable, RegionError

_LOCK = threading.Lock()
_BLOCKS: dict[int, FdBlock] = {}
"""Those of this process that are open, by address."""


class FdBlock:
    """`nbytes` bytes of a device, not cleared, which `export` shares. `close` twice is fine.

    Memory rules: nothing here may read or write the block once it is closed. Whoever has it mapped elsewhere keeps the
    memory itself until that mapping goes.
    """

    def __init__(self, nbytes: int, device: int) -> None:
        """Raises `BackendUnavailable` when the device has not enough free memory, or cannot share any in this way."""
        self.nbytes, self.device = nbytes, device
        if not device_attribute("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", device):
            raise BackendUnavailable(
                f"device {device} shares no memory by file descriptor; use a block of cudaMalloc, shared by CUDA IPC"
            )
        wanted = _properties(device)
        flag = constant("CUmemAllocationGranularity_flags", "CU_MEM_ALLOC_GRANULARITY_RECOMMENDED")
        with on_device(device):
            unit = int(call("cuMemGetAllocationGranularity", wanted, flag))
            self._size = -(-nbytes // unit) * unit
            try:
                self._handle = call("cuMemCreate", self._size, wanted, 0)
            except BackendError as error:
                raise BackendUnavailable(f"device {device} has no {self._size} bytes to spare: {error}") from error
        self._is_open = True
        try:
            self.address = map_handle(self._handle, self._size, device)
        except BaseException:
            self._release()
            raise
        with _LOCK:
            _BLOCKS[self.address] = self

    @property
    def size(self) -> int:
        """`nbytes`, rounded up to what the device gives."""
        return self._size

    def export(self) -> int:
        """A file descriptor by which another process maps the block. The caller closes it."""
        kind = constant("CUmemAllocationHandleType", "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR")
        return int(call("cuMemExportToShareableHandle", self._handle, kind, 0))

    def close(self) -> None:
        with _LOCK:
            if not self._is_open:
                return
            self._is_open = False
            del _BLOCKS[self.address]
        unmap_handle(self.address, self._size, self.device)
        self._release()

    def _release(self) -> None:
        self._is_open = False
        with on_device(self.device):
            call("cuMemRelease", self._handle)


def find_block(address: int) -> FdBlock | None:
    """The open block of this process that holds `address`."""
    with _LOCK:
        return next((one for start, one in _BLOCKS.items() if start <= address < start + one.size), None)


def map_handle(handle: Any, size: int, device: int) -> int:
    """The address at which `device` reads and writes an allocation of `size` bytes. Raises `BackendError`."""
    driver = bindings()
    with on_device(device):
        address = int(call("cuMemAddressReserve", size, 0, 0, 0))
        try:
            call("cuMemMap", address, size, 0, handle, 0)
        except BaseException:
            call("cuMemAddressFree", address, size)
            raise
        access = driver.CUmemAccessDesc()
        access.location.type = constant("CUmemLocationType", "CU_MEM_LOCATION_TYPE_DEVICE")
        access.location.id = device
        access.flags = constant("CUmemAccess_flags", "CU_MEM_ACCESS_FLAGS_PROT_READWRITE")
        try:
            call("cuMemSetAccess", address, size, [access], 1)
        except BaseException:
            unmap_handle(address, size, device)
            raise
    return address


def unmap_handle(address: int, size: int, device: int) -> None:
    """Undo `map_handle`. Nothing on the device may still use the addresses."""
    with on_device(device):
        call("cuMemUnmap", address, size)
        call("cuMemAddressFree", address, size)


@contextlib.contextmanager
def imported(fd: int) -> Iterator[Any]:
    """The allocation behind another process's file descriptor, within. What is mapped of it stays; `fd` is the
    caller's. Raises `RegionError` where it is none."""
    kind = constant("CUmemAllocationHandleType", "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR")
    try:
        handle = call("cuMemImportFromShareableHandle", fd, kind)
    except BackendError as error:
        raise RegionError(
            f"what the engine handed over is no device memory that can be mapped here: {error}"
        ) from error
    try:
        yield handle
    finally:
        call("cuMemRelease", handle)


def device_of(handle: Any) -> int:
    """On which device, as this process counts them, an allocation is."""
    return int(call("cuMemGetAllocationPropertiesFromHandle", handle).location.id)


def _properties(device: int) -> Any:
    made = bindings().CUmemAllocationProp()
    made.type = constant("CUmemAllocationType", "CU_MEM_ALLOCATION_TYPE_PINNED")
    made.location.type = constant("CUmemLocationType", "CU_MEM_LOCATION_TYPE_DEVICE")
    made.location.id = device
    made.requestedHandleTypes = constant("CUmemAllocationHandleType", "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR")
    if device_attribute("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED", device):
        made.allocFlags.gpuDirectRDMACapable = 1  # for a Node in the engine's own process
    return made
