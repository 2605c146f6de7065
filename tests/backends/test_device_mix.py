"""What pdlink does around the operations on a device, of pretence here: memory, streams, the trial, the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pdlink.backends import device_mix
from pdlink.backends.device_mix import TRIAL_BYTES, DeviceMix
from pdlink.backends.torch_mix import SCRATCH_WORDS
from pdlink.errors import BackendError, BackendUnavailable
from pdlink.layout.regions import MemoryKind, Region
from pdlink.transfer.digests import DigestKind, page_digests
from tests import pretend_gpu
from tests.pretend_gpu import PretendDriver, pretend_gpus
from tests.transfer.values import ints


class Device:
    """Devices of pretence as torch sees them: every operation has to be queued on the stream that was made for it."""

    def __init__(self, driver: PretendDriver, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = driver
        self.queues: list[tuple[int, torch.device]] = []
        self.current: object = None
        self.num_gathers = 0
        self._gather = torch.index_select
        of_cuda = {"is_available": lambda: True, "init": lambda: None, "ExternalStream": self.wrap, "stream": self.on}
        for name, made in of_cuda.items():
            monkeypatch.setattr(torch.cuda, name, made)
        monkeypatch.setattr(torch, "as_tensor", self.see)
        monkeypatch.setattr(torch, "index_select", self.gather)
        monkeypatch.setattr(pretend_gpu._Stream, "__int__", lambda stream: id(stream), raising=False)

    def wrap(self, handle: int, device: torch.device) -> object:
        self.queues.append((handle, device))
        return self.queues[-1]

    @contextlib.contextmanager
    def on(self, queue: object) -> Iterator[None]:
        self.current = queue
        try:
            yield
        finally:
            self.current = None

    def see(self, memory: Any, device: torch.device) -> torch.Tensor:
        """numpy reads of host memory what torch reads of a device's: the two interfaces have the same fields."""
        assert device.type == "cuda"
        told = memory.__cuda_array_interface__
        return torch.from_numpy(np.asarray(SimpleNamespace(__array_interface__=told)))

    def gather(self, *asked: Any, **more: Any) -> torch.Tensor:
        assert self.current in self.queues, "not on the stream of its own"
        self.num_gathers += 1
        return self._gather(*asked, **more)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    with pretend_gpus() as driver:
        yield Device(driver, monkeypatch)


def on_device(device: Device, page_bytes: int, stride: int, num_pages: int = 6) -> Region:
    block = device.driver.allocate(stride * num_pages + 1)
    block.array[:] = np.random.default_rng(page_bytes).integers(0, 256, block.nbytes, dtype=np.uint8)
    return Region("latent", 0, block.address + page_bytes % 2, stride, page_bytes, num_pages, MemoryKind.CUDA, 1)


def test_pages_on_a_device_have_the_digests_of_their_bytes_and_are_read_on_a_stream_of_its_own(device: Device) -> None:
    mix = DeviceMix(1)
    assert [where for _, where in device.queues] == [torch.device("cuda", 1)]
    before, ids = device.num_gathers, ints([5, 0, 2])
    for page_bytes, stride in ((656, 656), (656, 1024), (41_984, 41_984), (132, 136), (133, 133)):
        region = on_device(device, page_bytes, stride)
        wanted = page_digests(DigestKind.MIX64, [replace(region, memory=MemoryKind.HOST, device=0)], ids)
        assert np.array_equal(mix.digests([region], ids), wanted)
    assert device.num_gathers == before + 5
    mix.close()


def test_its_memory_is_made_at_once_is_all_there_ever_is_and_goes_back(device: Device) -> None:
    num_before = len(device.driver.blocks)
    mix = DeviceMix(0)
    made = list(device.driver.blocks.values())[num_before:]
    assert [one.nbytes for one in made] == [8 * SCRATCH_WORDS + TRIAL_BYTES]
    region = on_device(device, 656, 656)
    mix.digests([region], ints(range(6)))
    assert len(device.driver.blocks) == num_before + 2  # with that of the region
    mix.close()
    mix.close()
    assert len(device.driver.blocks) == num_before + 1


def test_a_device_that_computes_something_else_than_the_host_is_not_used(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_mix, "mix64", lambda rows, ids: np.zeros(len(ids), dtype=np.uint64))
    with pytest.raises(BackendUnavailable, match="device 1 is of no use to torch: it computes other digests"):
        DeviceMix(1)
    assert device.driver.blocks == {}


@pytest.mark.parametrize("when", ["wrap", "see", "gather"])
def test_whatever_torch_raises_at_the_start_is_why_the_device_is_not_used(
    device: Device, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def fail(*asked: object, **more: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available")

    where = {"wrap": (torch.cuda, "ExternalStream"), "see": (torch, "as_tensor"), "gather": (torch, "index_select")}
    monkeypatch.setattr(*where[when], fail)
    with pytest.raises(BackendUnavailable, match=r"device 0 is of no use to torch: .*no kernel image"):
        DeviceMix(0)
    assert device.driver.blocks == {}


def test_a_device_that_fails_later_is_told_of_by_name(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    mix, region = DeviceMix(1), on_device(device, 656, 656)

    def fail(*asked: object, **more: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "index_select", fail)
    with pytest.raises(BackendError, match="device 1 could not make digests: CUDA error: an illegal memory access"):
        mix.digests([region], ints([0]))
    mix.close()


def test_a_device_without_room_is_not_used(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    error = pretend_gpu.CUresult.CUDA_ERROR_INVALID_VALUE
    monkeypatch.setattr(PretendDriver, "cuMemAlloc", lambda driver, nbytes: (error, 0))
    with pytest.raises(BackendUnavailable, match=r"device 0 has no \d+ bytes to spare"):
        DeviceMix(0)
