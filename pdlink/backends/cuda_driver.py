"""Owns the calls into the CUDA driver, and the one place where its errors are translated. It launches nothing.

Everything here works on a device's primary context, the one that PyTorch uses, and leaves the calling thread's current
context as it was. The driver is loaded on first use, through NVIDIA's `cuda-bindings`.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any
from uuid import UUID

from pdlink.errors import BackendError, BackendUnavailable, RegionError

HANDLE_BYTES = 64
"""Of an exported allocation, as the driver defines it (`CU_IPC_HANDLE_SIZE`)."""

INSTALL = "pip install 'pdlink[cuda13]' (or 'pdlink[cuda12]', as the driver allows)"
EXPANDABLE = (
    "PyTorch's expandable segments and other allocators over cuMemMap cannot be shared between processes this way: "
    "unset expandable_segments in PYTORCH_ALLOC_CONF (PYTORCH_CUDA_ALLOC_CONF)"
)


@cache
def bindings() -> Any:
    """The driver's bindings, initialised. Raises `BackendUnavailable` with what is missing."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise BackendUnavailable(f"device memory needs the package cuda-bindings ({error}); {INSTALL}") from error
    try:
        (code,) = driver.cuInit(0)
    except Exception as error:  # the bindings' own kind, when libcuda.so.1 is not found
        raise BackendUnavailable(f"device memory needs NVIDIA's driver, libcuda.so.1: {error}") from error
    if code != driver.CUresult.CUDA_SUCCESS:
        raise BackendUnavailable(f"NVIDIA's driver does not start: {_name(driver, code)}")
    return driver


def _name(driver: Any, code: Any) -> str:
    _, text = driver.cuGetErrorName(code)
    return text.decode() if text else str(code)


def call(function: str, *arguments: Any) -> Any:
    """Call the driver's `function`; returns its result, None where it has none. Raises `BackendError` by name."""
    driver = bindings()
    code, *results = getattr(driver, function)(*arguments)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise BackendError(f"{function} failed: {_name(driver, code)}")
    return results[0] if len(results) == 1 else (tuple(results) if results else None)


def constant(enumeration: str, name: str) -> Any:
    """A member of one of the driver's enumerations."""
    return getattr(getattr(bindings(), enumeration), name)


def num_devices() -> int:
    """How many devices this process sees; 0 where there is no driver or no binding to it."""
    try:
        return int(call("cuDeviceGetCount"))
    except BackendError:
        return 0


@cache
def device_uuid(device: int) -> str:
    """The name of a device that is equal in every process, whatever CUDA_VISIBLE_DEVICES is there."""
    uuid = call("cuDeviceGetUuid", _device(device))
    return ctypes.string_at(uuid.getPtr(), 16).hex()


def gpu_name(uuid: str) -> str:
    """A device's name as NVIDIA's tools and CUDA_VISIBLE_DEVICES have it, from 32 hexadecimal digits."""
    return f"GPU-{UUID(uuid)}"


@cache
def device_attribute(name: str, device: int) -> int:
    """An attribute of a device, by the driver's name for it without `CU_DEVICE_ATTRIBUTE_`."""
    attribute = constant("CUdevice_attribute", f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(call("cuDeviceGetAttribute", attribute, _device(device)))


def num_multiprocessors(device: int) -> int:
    return device_attribute("MULTIPROCESSOR_COUNT", device)


@cache
def architecture(device: int) -> str:
    """What a compiler calls the device's instruction set, such as `sm_90`."""
    major, minor = (device_attribute(f"COMPUTE_CAPABILITY_{part}", device) for part in ("MAJOR", "MINOR"))
    return f"sm_{major}{minor}"


@cache
def _device(device: int) -> Any:
    count = num_devices()
    if not 0 <= device < count:
        raise BackendUnavailable(f"device {device} is none of the {count} that this process sees")
    return call("cuDeviceGet", device)


_CONTEXT_LOCK = threading.Lock()
_CONTEXTS: dict[int, Any] = {}


def _context(device: int) -> Any:
    """The device's primary context, retained once for the life of this process."""
    with _CONTEXT_LOCK:
        if device not in _CONTEXTS:
            _CONTEXTS[device] = call("cuDevicePrimaryCtxRetain", _device(device))
        return _CONTEXTS[device]


class _OnDevice:
    """See `on_device`. Not a generator, and no switch where none is needed: launches take this way."""

    __slots__ = ("_context", "_switches")

    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._switches = call("cuCtxGetCurrent") != self._context
        if self._switches:
            call("cuCtxPushCurrent", self._context)

    def __exit__(self, *_: object) -> None:
        if self._switches:
            call("cuCtxPopCurrent")


def on_device(device: int) -> AbstractContextManager[None]:
    """Within, the calling thread's current context is the device's; afterwards it is what it was."""
    return _OnDevice(_CONTEXTS.get(device) or _context(device))


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation of the driver: addresses [start, stop) of a device. Regions are parts of one."""

    start: int
    stop: int
    device: int


def find_allocation(address: int, device: int) -> Allocation:
    """The allocation of `device` that holds `address`. Raises `RegionError` when there is none in this process."""
    driver = bindings()
    with on_device(device):
        code, start, nbytes = driver.cuMemGetAddressRange(address)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise RegionError(f"address {address:#x} is no memory of device {device} ({_name(driver, code)})")
    return Allocation(int(start), int(start) + int(nbytes), device)


def export(allocation: Allocation) -> bytes:
    """A handle by which another process of this host can map the allocation. Raises `RegionError` where none can."""
    try:
        with on_device(allocation.device):
            handle = call("cuIpcGetMemHandle", allocation.start)
    except BackendError as error:
        raise RegionError(
            f"memory {allocation.start:#x} of device {allocation.device}: {error}; {EXPANDABLE}"
        ) from error
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def map_exported(handle: bytes, device: int) -> int:
    """The address at which `device` reads an allocation that another process exported. Raises `BackendError`."""
    driver = bindings()
    made = driver.CUipcMemHandle()
    ctypes.memmove(made.getPtr(), handle, HANDLE_BYTES)
    flag = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    with on_device(device):
        return int(call("cuIpcOpenMemHandle", made, flag.value))


def unmap(address: int, device: int) -> None:
    with on_device(device):
        call("cuIpcCloseMemHandle", address)


def is_over(event: Any, device: int) -> bool:
    """Whether the work before the newest record of `event` is done. Raises `BackendError` when the device failed."""
    driver = bindings()
    (code,) = driver.cuEventQuery(event)
    if code == driver.CUresult.CUDA_ERROR_NOT_READY:
        return False
    if code != driver.CUresult.CUDA_SUCCESS:
        raise BackendError(f"device {device} has failed: {_name(driver, code)}")
    return True


def check_reach(reader: int, owner: int) -> None:
    """Raise `BackendUnavailable` unless `reader` can read the memory of `owner`, both devices as seen here."""
    if reader == owner or call("cuDeviceCanAccessPeer", _device(reader), _device(owner)):
        return
    raise BackendUnavailable(
        f"device {reader} cannot read the memory of device {owner}: no NVLink and no peer access over PCIe between them"
    )


def open_to(reader: int, owner: int) -> None:
    """Let kernels on `reader` read all memory of this process on `owner`. Again is fine."""
    check_reach(reader, owner)
    if reader == owner:
        return
    driver = bindings()
    with on_device(reader):
        (code,) = driver.cuCtxEnablePeerAccess(_context(owner), 0)
    if code not in (driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED):
        raise BackendUnavailable(f"device {reader} cannot read device {owner}: {_name(driver, code)}")


def find_device(uuid: str) -> int | None:
    """Which device of this process has that name, if any."""
    return next((one for one in range(num_devices()) if device_uuid(one) == uuid), None)


_OWN_BLOCKS: set[int] = set()
"""Where the blocks of this process begin that `DeviceBlock` has made."""


def is_own_block(start: int) -> bool:
    """Whether the allocation that begins at `start` is a `DeviceBlock` of this process, so that nobody else uses it."""
    return start in _OWN_BLOCKS


class DeviceBlock:
    """`nbytes` bytes of device memory that other processes can map, not cleared. `close` twice is fine.

    Freed memory may be handed out again at once: nothing may read or write the block when it is closed.
    """

    def __init__(self, nbytes: int, device: int) -> None:
        """Raises `BackendUnavailable` when the device has not enough free memory."""
        self.nbytes, self.device = nbytes, device
        try:
            with on_device(device):
                self.address = int(call("cuMemAlloc", nbytes))
        except BackendError as error:
            raise BackendUnavailable(f"device {device} has no {nbytes} bytes to spare: {error}") from error
        self._closed = False
        _OWN_BLOCKS.add(self.address)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            _OWN_BLOCKS.discard(self.address)
            with on_device(self.device):
                call("cuMemFree", self.address)


class PinnedBlock:
    """`nbytes` bytes of host memory that devices of this process read and write in place. `close` twice is fine."""

    def __init__(self, nbytes: int, device: int) -> None:
        driver = bindings()
        self.nbytes, self.device = nbytes, device
        with on_device(device):
            flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
            self.address = int(call("cuMemHostAlloc", nbytes, flags))
        self._closed = False

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with on_device(self.device):
                call("cuMemFreeHost", self.address)
