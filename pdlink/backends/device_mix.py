"""Owns mix64 on one CUDA device: the scratch memory, the stream and the view of regions that `torch_mix` computes with
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from pdlink.backends.cuda_driver import DeviceBlock
from pdlink.backends.cuda_stream import Stream
from pdlink.errors import BackendError, BackendUnavailable
from pdlink.layout.regions import MemoryKind, Region
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.digests import Digests
from pdlink.transfer.mix64 import WORD_BYTES, mix64

if TYPE_CHECKING:
    import torch

TRIAL_BYTES = 16 << 10
_TRIALS = ((2048, 0, 8192, 8192), (64, 1, 8191, 8191), (64, 8, 132, 136))
"""(how often, offset, bytes of a page, stride): words in place, all scratch memory full; bytes that lie across words; a
tail."""


class DeviceMix:
    """Digests of pages where they lie, on a stream of its own. For one thread at a time; `close` twice is fine.

    Nothing waits for an engine's stream: pages are read as they are, and the caller vouches that whatever writes them
    is over. All scratch memory is made here, and what a device has to load for it is loaded, because either may wait
    for work that an engine has launched. Loads torch. Raises `BackendUnavailable`, also when a trial comes out wrong.
    """

    def __init__(self, device: int) -> None:
        import torch

        from pdlink.backends.torch_mix import SCRATCH_WORDS, TorchMix

        if not torch.cuda.is_available():
            raise BackendUnavailable(f"torch {torch.__version__} sees no CUDA device; install a CUDA build of torch")
        self.device = device
        self._where = torch.device("cuda", device)
        with ExitStack() as starting:
            block = DeviceBlock(WORD_BYTES * SCRATCH_WORDS + TRIAL_BYTES, device)
            starting.callback(block.close)
            stream = Stream(device)
            starting.callback(stream.close)
            try:
                torch.cuda.init()  # type: ignore[no-untyped-call]
                self._queue: torch.cuda.Stream = torch.cuda.ExternalStream(  # type: ignore[no-untyped-call]
                    int(stream.handle), device=self._where
                )
                words = self._rows(block.address, WORD_BYTES, WORD_BYTES, SCRATCH_WORDS).view(torch.int64)
                self._mix = TorchMix(words.view(SCRATCH_WORDS), self._rows_of)
                self._try(block.address + WORD_BYTES * SCRATCH_WORDS)
            except (RuntimeError, BackendError) as error:  # the former is how torch tells of a device
                raise BackendUnavailable(f"device {device} is of no use to torch: {error}") from error
            self._stack = starting.pop_all()

    def digests(self, regions: Sequence[Region], pages: Int64Array) -> Digests:
        """uint64 [len(regions), len(pages)], of regions on this device. Raises `BackendError` when the device fails."""
        import torch

        try:
            with torch.cuda.stream(self._queue):
                return self._mix.digests(regions, pages)
        except RuntimeError as error:  # how torch tells of a device
            raise BackendError(f"device {self.device} could not make digests: {error}") from error

    def close(self) -> None:
        """Give stream and memory back. There are no digests after that."""
        self._stack.close()

    def _try(self, address: int) -> None:
        """Digest memory of our own in every way there is, and compare with the host."""
        import torch

        data = np.random.default_rng(64).integers(0, 256, TRIAL_BYTES, dtype=np.uint8)
        with torch.cuda.stream(self._queue):
            self._rows(address, TRIAL_BYTES, TRIAL_BYTES, 1).copy_(torch.from_numpy(data[None]))
        for count, offset, page_bytes, stride in _TRIALS:
            region = Region("trial", 0, address + offset, stride, page_bytes, 1, MemoryKind.CUDA, self.device)
            ids = np.zeros(count, dtype=np.int64)
            wanted = mix64(data[None, offset : offset + page_bytes], ids[:1])[0]
            if not (self.digests([region], ids) == wanted).all():
                raise BackendUnavailable("it computes other digests than the host")

    def _rows_of(self, region: Region) -> torch.Tensor:
        return self._rows(region.base_address, region.page_bytes, region.page_stride, region.num_pages)

    def _rows(self, address: int, nbytes: int, stride: int, num_rows: int) -> torch.Tensor:
        """uint8 [num_rows, nbytes] over memory of the device, which it does not keep alive."""
        import torch

        return torch.as_tensor(_Memory(address, (num_rows, nbytes), (stride, 1)), device=self._where)


class _Memory:
    """Bytes on a device, in the words of Numba's `__cuda_array_interface__` (version 3), which torch reads."""

    def __init__(self, address: int, shape: tuple[int, int], strides: tuple[int, int]) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": shape,
            "typestr": "|u1",
            "data": (address, False),
            "strides": strides,
            "version": 3,
        }
