"""Owns one CUDA device as a pool uses it: its two lanes as streams, and what is launched in them. Decides nothing.

COMPUTE is PyTorch's current stream at each call; FETCH is a stream of its own, of high priority.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pdlink.backends.cuda_driver import DeviceBlock, PinnedBlock, call, check_reach, device_uuid, find_device, on_device
from pdlink.backends.cuda_places import Events
from pdlink.backends.pool_kernels import TROUBLE_WORDS, PoolKernels
from pdlink.errors import BackendUnavailable
from pdlink.layout.regions import MemoryKind
from pdlink.memory.communicator import Communicator
from pdlink.memory.cuda_blocks import CudaBlock, CudaMapping
from pdlink.memory.nccl_link import NcclLink
from pdlink.memory.pool_device import Lane, PageCopy, PageList, Trouble, TroubleKind

_PRIVATE_BYTES = 4096
_EMPTY_LIST, _SPARE_WORD = 512, 1024


class CudaDevice:
    """Device `index` of this process. Implements `PoolDevice`; its pools are closed before it.

    `num_blocks` is how many of the device's multiprocessors a gather may take while it runs beside the engine's
    kernels; None: all. Raises `BackendUnavailable` without a device, NVIDIA's bindings or its run-time compiler.
    """

    memory = MemoryKind.CUDA

    def __init__(self, index: int, *, num_blocks: int | None = None) -> None:
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise BackendUnavailable(f"torch {torch.__version__} finds no CUDA device {index}")
        self.index = index
        self.torch_device = torch.device("cuda", index)
        self.identity = device_uuid(index)
        with torch.cuda.device(index):
            self._fetch: torch.cuda.Stream = torch.cuda.Stream(index, priority=-1)  # type: ignore[no-untyped-call]
            self._fetch_stream = int(self._fetch.cuda_stream)
            self._private = DeviceBlock(_PRIVATE_BYTES, index)
            self._told = PinnedBlock(_PRIVATE_BYTES, index)
        self._seen = np.ctypeslib.as_array((ctypes.c_int64 * TROUBLE_WORDS).from_address(self._told.address))
        self._kernels = PoolKernels(index, self._private.address, self._told.address, num_blocks)
        self._events = Events(index)
        self._is_closed = False
        self.clear_trouble()
        self._kernels.load(self._fetch_stream, self._private.address + _EMPTY_LIST, self._private.address + _SPARE_WORD)
        self._fetch.synchronize()

    def reaches(self, identity: str) -> bool:
        owner = find_device(identity)
        if owner is None:
            return False
        try:
            check_reach(self.index, owner)
        except BackendUnavailable:
            return False
        return True

    @property
    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def allocate(self, nbytes: int) -> CudaBlock:
        return CudaBlock(nbytes, self.index)

    def show(self, memory: Any) -> dict[str, Any]:
        shown: dict[str, Any] = memory.show()
        return shown

    def map(self, shown: dict[str, Any]) -> CudaMapping:
        return CudaMapping(shown, self.index)

    def link(self, communicator: Communicator) -> NcclLink:
        return NcclLink(communicator, self.index, self._fetch)

    def list_pages(self, page_ids: np.ndarray) -> PageList:
        here = torch.empty(1 + len(page_ids), dtype=torch.int64, pin_memory=True)
        here[0] = len(page_ids)
        here[1:] = torch.from_numpy(page_ids)
        # Made on the stream that reads it, so that its memory is not reused before that has gone by.
        with torch.cuda.stream(self._fetch):
            there = here.to(self.torch_device, non_blocking=True)
        return PageList(there.data_ptr(), len(page_ids), there)

    def scratch(self, shape: Sequence[int]) -> torch.Tensor:
        made = torch.zeros(tuple(shape), dtype=torch.uint8, device=self.torch_device)
        made.record_stream(self._fetch)
        return made

    def fill(self, target: torch.Tensor, values: np.ndarray) -> None:
        here = torch.empty(len(values), dtype=torch.int64, pin_memory=True)
        here.copy_(torch.from_numpy(values))
        with torch.cuda.stream(self._fetch):
            target.view(torch.int64)[: len(values)].copy_(here, non_blocking=True)

    def fork(self) -> None:
        self._events.wait(self._fetch_stream, self._events.place(self._stream(Lane.COMPUTE)))

    def mark(self) -> Any:
        return self._events.place(self._fetch_stream)

    def join(self, mark: Any) -> None:
        self._events.wait(self._stream(Lane.COMPUTE), mark)

    def is_over(self, mark: Any) -> bool:
        return self._events.is_over(mark)

    def advance(self, lane: Lane, word: int, value: int) -> None:
        self._kernels.advance(self._stream(lane), word, value)

    def wait_for(
        self,
        lane: Lane,
        words: Sequence[int],
        ranks: Sequence[int],
        value: int,
        timeout_s: float,
        broken: int = 0,
        base: int = 0,
    ) -> None:
        self._kernels.wait(self._stream(lane), words, ranks, value, timeout_s, broken, base)

    def look_for_broken(self, words: Sequence[int], ranks: Sequence[int], value: int) -> None:
        self._kernels.look(self._fetch_stream, words, ranks, value)

    def copy(self, copy: PageCopy) -> None:
        self._kernels.copy(
            self._fetch_stream,
            copy.source,
            copy.target,
            copy.page_bytes,
            copy.pages.address,
            copy.pages.num_pages,
            copy.source_is_packed,
            copy.target_is_packed,
        )

    def stamp(self, address: int, words: np.ndarray) -> None:
        self._kernels.stamp(self._fetch_stream, address, words)

    def check_stamp(self, address: int, words: np.ndarray, rank: int) -> None:
        self._kernels.check(self._fetch_stream, address, words, rank)

    def trouble(self) -> Trouble | None:
        kind, rank, wanted, seen = (int(one) for one in self._seen)
        return Trouble(TroubleKind(kind), rank, wanted, seen) if kind else None

    def clear_trouble(self) -> None:
        with on_device(self.index):
            call("cuMemsetD8Async", self._private.address, 0, _PRIVATE_BYTES, self._fetch_stream)
            call("cuStreamSynchronize", self._fetch_stream)
        self._seen[:] = 0

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            with on_device(self.index):
                call("cuStreamSynchronize", self._fetch_stream)
            self._seen = np.zeros(TROUBLE_WORDS, np.int64)
            self._events.close()
            self._private.close()
            self._told.close()

    def _stream(self, lane: Lane) -> int:
        if lane is Lane.FETCH:
            return self._fetch_stream
        # What torch.cuda.current_stream gives, without an object made for it.
        return int(torch._C._cuda_getCurrentRawStream(self.index))
