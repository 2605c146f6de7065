"""Owns device memory of other processes as it is mapped here to be read and written, and what of it can be passed on.

NVIDIA's driver exports nothing that was imported. But a CUDA IPC handle holds for every process of the host, so that
whoever has it can name it to others; a file descriptor cannot be named.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress

from pdlink.backends import cuda_driver, cuda_vmm
from pdlink.errors import BackendError, PeerGone, RegionError

_LOCK = threading.Lock()
_IMPORTS: dict[int, ImportedBlock] = {}
"""Those that are open, by address."""


class ImportedBlock:
    """`nbytes` bytes of another process from `address` on, as `device` of this process reads and writes them.

    `handle` is what others map the same memory by, None where only its owner can share it. Memory rules: the owner's,
    which alone says when a page may be written. Nothing on the device may use the addresses when it is closed; twice is
    fine.
    """

    def __init__(self, address: int, nbytes: int, device: int, handle: bytes | None, unmap: Callable[[], None]) -> None:
        """Call `by_handle` or `by_descriptor` instead."""
        self.address, self.nbytes, self.device, self.handle = address, nbytes, device, handle
        self._unmap = unmap
        self._is_open = True
        with _LOCK:
            _IMPORTS[address] = self

    @classmethod
    def by_handle(cls, handle: bytes, nbytes: int, device: int) -> ImportedBlock:
        """An allocation of cudaMalloc's that its owner has exported. Raises `RegionError`."""
        try:
            address = cuda_driver.map_exported(handle, device)
        except BackendError as error:
            raise PeerGone(f"device memory of the engine cannot be mapped ({error}); it may have ended") from error
        made = cls(address, nbytes, device, handle, lambda: cuda_driver.unmap(address, device))
        try:
            found = cuda_driver.find_allocation(address, device)
            if found.stop < address + nbytes:
                raise RegionError(
                    f"device memory of the engine has {found.stop - address} bytes, the engine said {nbytes}"
                )
        except BaseException:
            made.close()
            raise
        return made

    @classmethod
    def by_descriptor(cls, fd: int, nbytes: int, device: int) -> ImportedBlock:
        """A block that its owner has shared by file descriptor, which stays the caller's. Raises `RegionError`."""
        with cuda_vmm.imported(fd) as handle:
            if (real := cuda_vmm.device_of(handle)) != device:
                raise RegionError(f"device memory of the engine is on device {real}, the engine said {device}")
            try:
                address = cuda_vmm.map_handle(handle, nbytes, device)
            except BackendError as error:
                raise RegionError(f"device memory of {nbytes} bytes cannot be mapped: {error}") from error
        return cls(address, nbytes, device, None, lambda: cuda_vmm.unmap_handle(address, nbytes, device))

    def close(self) -> None:
        with _LOCK:
            if not self._is_open:
                return
            self._is_open = False
            _IMPORTS.pop(self.address, None)
        with suppress(BackendError):  # a device that has failed takes its mappings along
            self._unmap()


def find_import(address: int) -> ImportedBlock | None:
    """The open block of another process that holds `address`."""
    with _LOCK:
        return next((one for one in _IMPORTS.values() if one.address <= address < one.address + one.nbytes), None)


class ImportedEvent:
    """An event of another process (CUDA IPC). `close` twice is fine, and comes before its owner ends it."""

    def __init__(self, handle: bytes, device: int) -> None:
        """Raises `PeerGone` where its owner has ended."""
        made = cuda_driver.bindings().CUipcEventHandle()
        ctypes.memmove(made.getPtr(), handle, cuda_driver.HANDLE_BYTES)
        self._device = device
        try:
            with cuda_driver.on_device(device):
                self._event = cuda_driver.call("cuIpcOpenEventHandle", made)
        except BackendError as error:
            raise PeerGone(f"an event of the engine cannot be opened ({error}); it may have ended") from error
        self._is_open = True

    def query(self) -> bool:
        """Whether the work before its newest record is done. Never blocks. Raises `BackendError`."""
        return cuda_driver.is_over(self._event, self._device)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            with suppress(BackendError), cuda_driver.on_device(self._device):
                cuda_driver.call("cuEventDestroy", self._event)
