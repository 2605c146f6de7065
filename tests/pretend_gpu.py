"""Owns two GPUs of pretence: a driver whose device memory is host memory, so that all but the kernel itself of what
pdlink does with devices runs without one.

Work on a stream is not done when it is launched, but some time later, in order, as looks at its events go by: whoever
reads, or writes a table anew, before it may has wrong bytes. Kernels move what `gather.cu` would, unit by unit.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from enum import IntEnum
from types import ModuleType
from typing import Any

import pytest

from pdlink.backends import cuda_copy, cuda_driver
from pdlink.backends.cuda_copy import NUM_ARGUMENTS
from pdlink.backends.cuda_kernels import CHUNK_BYTES, WORD_BYTES
from pdlink.backends.shm import Segment

NUM_DEVICES = 2
LOOKS_PER_STEP = 2
"""Looks at events for one more step of a stream."""
CACHED = ("bindings", "device_uuid", "device_attribute", "architecture", "_device")


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704


OK = (CUresult.CUDA_SUCCESS,)


class _Constants(IntEnum):
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_EVENT_DISABLE_TIMING = 2
    CU_STREAM_NON_BLOCKING = 1


class _Handle:
    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:
        return ctypes.addressof(self._bytes)


class _Stream:
    """Steps that are launched, and how many of them are done."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.steps: deque[Callable[[], None]] = deque()
        self.num_launched = self.num_done = self.num_looks = 0

    def launch(self, step: Callable[[], None]) -> None:
        with self.lock:
            self.steps.append(step)
            self.num_launched += 1

    def look(self) -> None:
        with self.lock:
            self.num_looks += 1
            if self.num_looks % LOOKS_PER_STEP == 0 and self.steps:
                self._step()

    def run_to(self, number: int) -> None:
        with self.lock:
            while self.num_done < number:
                self._step()

    def _step(self) -> None:
        self.steps.popleft()()
        self.num_done += 1


class _Event:
    stream: _Stream
    number = 0


class PretendDriver(ModuleType):
    """What pdlink calls of `cuda.bindings.driver`."""

    CUresult = CUresult
    CUdevice_attribute = CUevent_flags = CUstream_flags = _Constants
    CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP = 1, 2

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.blocks: dict[int, Any] = {}
        """By address; each has `nbytes`."""
        self.num_kernels = 0

    def allocate(self, nbytes: int) -> Segment:
        """Memory that counts as a device's for as long as this driver does."""
        segment = Segment.create(nbytes)
        self.blocks[segment.address] = segment
        return segment

    def find(self, address: int) -> Any:
        return next((one for start, one in self.blocks.items() if start <= address < start + one.nbytes), None)

    # What follows is named by NVIDIA.

    def cuInit(self, flags: int) -> Any:
        return OK

    def cuGetErrorName(self, code: CUresult) -> Any:
        return *OK, code.name.encode()

    def cuDeviceGetCount(self) -> Any:
        return *OK, NUM_DEVICES

    def cuDeviceGet(self, number: int) -> Any:
        return *OK, number

    def cuDeviceGetUuid(self, device: int) -> Any:
        uuid = _Handle()
        ctypes.memmove(uuid.getPtr(), bytes([device + 1]) * 16, 16)
        return *OK, uuid

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> Any:
        return *OK, 4

    def cuDeviceCanAccessPeer(self, reader: int, owner: int) -> Any:
        return *OK, 1

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        return *OK, device

    def cuCtxGetCurrent(self) -> Any:
        return *OK, None

    def cuCtxPushCurrent(self, context: int) -> Any:
        return OK

    def cuCtxPopCurrent(self) -> Any:
        return *OK, 0

    def cuCtxEnablePeerAccess(self, context: int, flags: int) -> Any:
        return OK

    def cuCtxGetStreamPriorityRange(self) -> Any:
        return *OK, 0, -5

    def cuMemAlloc(self, nbytes: int) -> Any:
        return *OK, self.allocate(nbytes).address

    def cuMemFree(self, address: int) -> Any:
        self.blocks.pop(address).close()
        return OK

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> Any:
        return self.cuMemAlloc(nbytes)

    def cuMemFreeHost(self, address: int) -> Any:
        return self.cuMemFree(address)

    def cuMemGetAddressRange(self, address: int) -> Any:
        found = self.find(address)
        return (*OK, found.address, found.nbytes) if found else (CUresult.CUDA_ERROR_INVALID_VALUE, 0, 0)

    def cuIpcGetMemHandle(self, address: int) -> Any:
        return *OK, _Handle()

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> Any:
        return *OK, _Stream()

    def cuStreamSynchronize(self, stream: _Stream) -> Any:
        stream.run_to(stream.num_launched)
        return OK

    def cuStreamDestroy(self, stream: _Stream) -> Any:
        return OK

    def cuEventCreate(self, flags: int) -> Any:
        return *OK, _Event()

    def cuEventDestroy(self, event: _Event) -> Any:
        return OK

    def cuEventRecord(self, event: _Event, stream: _Stream) -> Any:
        event.stream, event.number = stream, stream.num_launched
        return OK

    def cuEventQuery(self, event: _Event) -> Any:
        event.stream.look()
        is_over = event.stream.num_done >= event.number
        return OK if is_over else (CUresult.CUDA_ERROR_NOT_READY,)

    def cuEventSynchronize(self, event: _Event) -> Any:
        event.stream.run_to(event.number)
        return OK

    def cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: _Stream) -> Any:
        stream.launch(lambda: ctypes.memmove(target, source, nbytes))
        return OK

    def cuLaunchKernel(self, word: int, *rest: Any) -> Any:
        grid, stream, pointers = rest[0], rest[7], (ctypes.c_int64 * NUM_ARGUMENTS).from_address(rest[8])
        values = [ctypes.c_int64.from_address(one).value for one in pointers]
        assert 1 <= grid <= 4
        self.num_kernels += 1
        stream.launch(lambda: _gather(word, *values))
        return OK


def _gather(word: int, source_pages: int, target_pages: int, layers: int, num_layers: int, num_units: int) -> None:
    """`gather.cu`, in Python."""
    for number in range(num_layers):
        row = (ctypes.c_int64 * 8).from_address(layers + 64 * number)[:]
        source_base, source_stride, target_base, target_stride, page_bytes, unit_bytes, per_page, first = row
        assert not any(one % word for one in (source_base, source_stride, target_base, target_stride, page_bytes))
        last = num_units
        if number + 1 < num_layers:
            last = ctypes.c_int64.from_address(layers + 64 * (number + 1) + 56).value
        for unit in range(last - first):
            page, offset = unit // per_page, unit % per_page * unit_bytes
            source, target = (
                ctypes.c_int64.from_address(pages + 8 * page).value for pages in (source_pages, target_pages)
            )
            nbytes = min(unit_bytes, page_bytes - offset)
            assert nbytes <= CHUNK_BYTES
            at, to = source_base + source * source_stride + offset, target_base + target * target_stride + offset
            ctypes.memmove(to, at, nbytes)


@contextlib.contextmanager
def pretend_gpus(driver: PretendDriver | None = None) -> Iterator[PretendDriver]:
    """Within, this process has two GPUs of pretence, and no other."""
    driver = driver or PretendDriver()
    package = ModuleType("cuda.bindings")
    package.driver = driver  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cuda.bindings", package)
        patch.setitem(sys.modules, "cuda", ModuleType("cuda"))
        patch.setattr(cuda_driver, "_CONTEXTS", {})
        patch.setattr(cuda_copy, "load_gather", lambda device: {word: word for word in WORD_BYTES})
        _forget()
        try:
            yield driver
        finally:
            _forget()
            for block in driver.blocks.values():
                block.close()


def _forget() -> None:
    for name in CACHED:
        getattr(cuda_driver, name).cache_clear()
