"""Owns what GPUs of pretence have beside `pretend_gpu`: memory that is shared by file descriptor or by handle, what the
driver says of it, and events that other processes open. Descriptors and mappings are real ones, of memfds.

All of it is within one process, which is both the engine and its sidecar.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tests.pretend_gpu import OK, CUresult, PretendDriver, _Event, _Handle, pretend_gpus

UNIT = 1 << 16
INVALID = (CUresult.CUDA_ERROR_INVALID_VALUE, 0)
FACTS = ("IS_LEGACY_CUDA_IPC_CAPABLE", "MEMPOOL_HANDLE", "IS_MANAGED")
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FIXED, _NO_RIGHTS = 0x10, 0


@dataclass(eq=False)
class Physical:
    """An allocation by handle. `device` is the very device, however a process counts it."""

    fd: int
    nbytes: int
    device: int


class PretendVmm(PretendDriver):
    """What the driver says of a block is `facts` of its address, else that cudaMalloc made it."""

    def __init__(self) -> None:
        super().__init__()
        names = ("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR", "ALLOC_GRANULARITY_RECOMMENDED", "ALLOCATION_TYPE_PINNED")
        names += ("LOCATION_TYPE_DEVICE", "ACCESS_FLAGS_PROT_READWRITE")
        known = SimpleNamespace(**{f"CU_MEM_{name}": name for name in names})
        for kind in ("AllocationHandleType", "AllocationGranularity_flags", "AllocationType", "LocationType"):
            setattr(self, f"CUmem{kind}", known)
        self.CUmemAccess_flags = known
        self.CUpointer_attribute = SimpleNamespace(**{f"CU_POINTER_ATTRIBUTE_{name}": name for name in FACTS})
        self.CUdevice_attribute = SimpleNamespace(
            **{name: 0 for name in dir(super().CUdevice_attribute) if name.startswith("CU_")},
            CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED=1,
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED=2,
        )
        self.CUevent_flags = SimpleNamespace(
            CU_EVENT_DISABLE_TIMING=SimpleNamespace(value=2), CU_EVENT_INTERPROCESS=SimpleNamespace(value=4)
        )
        self.facts: dict[int, dict[str, int]] = {}
        self.vmm: set[int] = set()
        """Blocks that were mapped by handle, by their address."""
        self.order = [0, 1]
        """Which device is which, as CUDA_VISIBLE_DEVICES may change it."""
        self.num_handles = 0
        """Allocations by handle that somebody holds."""
        self._shared: dict[bytes, Any] = {}

    def cuDeviceGetUuid(self, device: int) -> Any:
        uuid = _Handle()
        ctypes.memmove(uuid.getPtr(), bytes([self.order[device] + 1]) * 16, 16)
        return *OK, uuid

    # --- memory by handle ---

    CUmemAllocationProp = staticmethod(
        lambda: SimpleNamespace(location=SimpleNamespace(id=0), allocFlags=SimpleNamespace())
    )
    CUmemAccessDesc = staticmethod(lambda: SimpleNamespace(location=SimpleNamespace(id=0)))

    def cuMemGetAllocationGranularity(self, wanted: Any, flag: Any) -> Any:
        return *OK, UNIT

    def cuMemCreate(self, nbytes: int, wanted: Any, flags: int) -> Any:
        device = self.order[wanted.location.id]
        fd = os.memfd_create(f"device-{device}")
        os.ftruncate(fd, nbytes)
        self.num_handles += 1
        return *OK, Physical(fd, nbytes, device)

    def cuMemRelease(self, handle: Physical) -> Any:
        os.close(handle.fd)
        self.num_handles -= 1
        return OK

    def cuMemExportToShareableHandle(self, handle: Physical, kind: Any, flags: int) -> Any:
        return *OK, os.dup(handle.fd)

    def cuMemImportFromShareableHandle(self, fd: int, kind: Any) -> Any:
        name = os.readlink(f"/proc/self/fd/{fd}")
        if not name.startswith("/memfd:device-"):
            return INVALID
        self.num_handles += 1
        return *OK, Physical(os.dup(fd), os.fstat(fd).st_size, int(name.removeprefix("/memfd:device-").split()[0]))

    def cuMemGetAllocationPropertiesFromHandle(self, handle: Physical) -> Any:
        return *OK, SimpleNamespace(location=SimpleNamespace(id=self.order.index(handle.device)))

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> Any:
        made = _LIBC.mmap(None, size, _NO_RIGHTS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        return *OK, made

    def cuMemMap(self, address: int, size: int, offset: int, handle: Physical, flags: int) -> Any:
        if size > handle.nbytes:
            return INVALID
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        _LIBC.mmap(address, size, rights, mmap.MAP_SHARED | _FIXED, handle.fd, 0)
        self.blocks[address] = SimpleNamespace(address=address, nbytes=size, close=lambda: None)
        self.vmm.add(address)
        self.facts[address] = dict.fromkeys(FACTS, 0)
        return OK

    def cuMemSetAccess(self, address: int, size: int, access: Any, count: int) -> Any:
        return OK

    def cuMemUnmap(self, address: int, size: int) -> Any:
        del self.blocks[address]
        self.vmm.remove(address)
        return OK

    def cuMemAddressFree(self, address: int, size: int) -> Any:
        assert address not in self.blocks
        _LIBC.munmap(address, size)
        return OK

    def cuMemRetainAllocationHandle(self, address: int) -> Any:
        found = self.find(address)
        if found is None or found.address not in self.vmm:
            return INVALID
        self.num_handles += 1
        return *OK, Physical(os.memfd_create("retained"), found.nbytes, 0)

    def cuPointerGetAttribute(self, name: str, address: int) -> Any:
        facts = self.facts.get(self.find(address).address, {"IS_LEGACY_CUDA_IPC_CAPABLE": 1})
        return *OK, facts.get(name, 0)

    # --- memory and events by handle of CUDA IPC: here they are what they are where they were made ---

    CUipcMemHandle = CUipcEventHandle = _Handle
    CUipcMem_flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=SimpleNamespace(value=1))

    def cuIpcGetMemHandle(self, address: int) -> Any:
        return self._name(self.find(address).address)

    def cuIpcOpenMemHandle(self, handle: _Handle, flags: int) -> Any:
        found = self._shared.get(ctypes.string_at(handle.getPtr(), 64))
        return (*OK, found) if found in self.blocks else INVALID

    def cuIpcCloseMemHandle(self, address: int) -> Any:
        return OK

    def cuIpcGetEventHandle(self, event: _Event) -> Any:
        return self._name(event)

    def cuIpcOpenEventHandle(self, handle: _Handle) -> Any:
        found = self._shared.get(ctypes.string_at(handle.getPtr(), 64))
        return (*OK, found) if found else INVALID

    def cuEventQuery(self, event: _Event) -> Any:
        return super().cuEventQuery(event) if hasattr(event, "stream") else OK

    def cuStreamWaitEvent(self, stream: Any, event: _Event, flags: int) -> Any:
        other, number = event.stream, event.number
        stream.launch(lambda: other.run_to(number))
        return OK

    def _name(self, what: Any) -> Any:
        made, name = _Handle(), len(self._shared).to_bytes(64)
        ctypes.memmove(made.getPtr(), name, 64)
        self._shared[name] = what
        return *OK, made


@contextlib.contextmanager
def pretend_vmm() -> Iterator[PretendVmm]:
    """Within, this process has two GPUs of pretence whose memory can be shared."""
    driver = PretendVmm()
    with pretend_gpus(driver):
        yield driver
