"""Owns one NCCL communicator, used for broadcasts on one stream. What is broadcast and whether it arrived is not known.

NCCL is called directly: PyTorch's process groups run on streams of their own and end the process when a peer is late.
The library is the one that PyTorch has loaded. Whoever wants NVLink multicast off sets NCCL_NVLS_ENABLE=0 before NCCL
is first used in a process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from pdlink.errors import BackendError, BackendUnavailable, DeadlineExceeded
from pdlink.memory.communicator import Communicator
from pdlink.threads import SupervisedThread

ID_BYTES = 128
_UINT8 = 1
_LIBRARY = "libnccl.so.2"


class _Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * ID_BYTES)]


@cache
def library() -> ctypes.CDLL:
    """NCCL with the types of what is called. Raises `BackendUnavailable` where PyTorch has not brought it."""
    try:
        nccl = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise BackendUnavailable(
            f"the broadcast reader on GPUs needs NCCL ({error}); install PyTorch's CUDA build, which brings it"
        ) from error
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    nccl.ncclGetUniqueId.argtypes = [ctypes.POINTER(_Id)]
    nccl.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), ctypes.c_int, _Id, ctypes.c_int]
    nccl.ncclBroadcast.argtypes = [pointer, pointer, size, ctypes.c_int, ctypes.c_int, pointer, pointer]
    nccl.ncclCommDestroy.argtypes = nccl.ncclCommAbort.argtypes = [pointer]
    return nccl


class NcclLink:
    """Broadcasts between the ranks of `communicator`, on `stream` (an address) of `device`. Implements `DataLink`.

    Making it is collective and ends within the communicator's timeout: raises `DeadlineExceeded`. A broadcast that a
    rank does not join stays on the stream until `abort`. One thread.
    """

    def __init__(self, communicator: Communicator, device: int, stream: torch.cuda.Stream) -> None:
        self._nccl = library()
        self._device = device
        self._stream = stream.cuda_stream
        self._comm = ctypes.c_void_p()
        mine = _Id()
        if communicator.rank == 0:
            self._call("ncclGetUniqueId", ctypes.byref(mine))
        record = torch.from_numpy(np.frombuffer(bytes(mine.internal), np.int64).copy())
        told = communicator.gather(record, "the making of a broadcast link")[0].numpy().tobytes()
        chosen = _Id.from_buffer_copy(told)
        size, rank = len(communicator.global_ranks), communicator.rank
        # The first broadcast sets connections up, for which the host waits.
        greeting = torch.zeros(ID_BYTES, dtype=torch.uint8, device=f"cuda:{device}")

        def make() -> None:
            with torch.cuda.device(device):
                self._call("ncclCommInitRank", ctypes.byref(self._comm), size, chosen, rank)
                self.broadcast(greeting.data_ptr(), ID_BYTES, 0)
                stream.synchronize()

        stream.wait_stream(torch.cuda.current_stream(device))
        _run(make, communicator.timeout_s, f"an NCCL communicator of {size} ranks")

    def broadcast(self, address: int, nbytes: int, root: int) -> None:
        with torch.cuda.device(self._device):
            self._call("ncclBroadcast", address, address, nbytes, _UINT8, root, self._comm, self._stream)

    def abort(self) -> None:
        self._end("ncclCommAbort")

    def close(self) -> None:
        self._end("ncclCommDestroy")

    def _end(self, function: str) -> None:
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm:
            with torch.cuda.device(self._device):
                self._call(function, comm)

    def _call(self, function: str, *arguments: object) -> None:
        code = getattr(self._nccl, function)(*arguments)
        if code:
            raise BackendError(f"{function} failed: {self._nccl.ncclGetErrorString(code).decode()}")


def _run(work: Callable[[], None], timeout_s: float, what: str) -> None:
    """Run what NCCL gives no time limit for. Raises `DeadlineExceeded`; the thread is then left to itself."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            work()
        except (BackendError, RuntimeError) as error:
            errors.append(error)

    thread = SupervisedThread(run, "pdlink-nccl", "the broadcast reader")
    thread.start()
    if not thread.join(timeout_s):
        raise DeadlineExceeded(f"{what} was not made within {timeout_s:g} s; all ranks must begin their forwards")
    if thread.death or errors:
        error = thread.death.error if thread.death else errors[0]
        raise BackendError(f"{what} was not made: {error}") from error
