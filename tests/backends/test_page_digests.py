"""Where digests are made: on the device that has the pages where that works, on the host otherwise, always the same."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

from pdlink.backends.copiers import HostCopier
from pdlink.backends.page_digests import PageDigests
from pdlink.backends.page_packs import PagePacks
from pdlink.backends.page_reads import BlockReads
from pdlink.backends.staging import PrivateBlock
from pdlink.backends.torch_mix import SCRATCH_WORDS, TorchMix
from pdlink.errors import BackendError, BackendUnavailable
from pdlink.layout.regions import MemoryKind, Region
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.digests import DigestKind, Digests, host_rows, page_digests
from tests.transfer.values import ints

NUM_PAGES, NBYTES, STRIDE = 9, 41, 48
MEMORY = np.random.default_rng(3).integers(0, 256, (4, NUM_PAGES, STRIDE), dtype=np.uint8)
PAGES = ints([4, 0, 8, 3])


def region(row: int, device: int | None = None) -> Region:
    base = MEMORY.__array_interface__["data"][0]
    made = Region("latent", row, base + row * NUM_PAGES * STRIDE, STRIDE, NBYTES, NUM_PAGES)
    return made if device is None else replace(made, memory=MemoryKind.CUDA, device=device)


def on_host(regions: Sequence[Region]) -> list[Region]:
    return [replace(one, memory=MemoryKind.HOST, device=0) for one in regions]


class PretendMix:
    """Digests as a device would make them, and a record of what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.closed = 0

    def digests(self, regions: Sequence[Region], pages: Int64Array) -> Digests:
        self.asked.append([one.layer for one in regions])
        return page_digests(DigestKind.MIX64, on_host(regions), pages)

    def close(self) -> None:
        self.closed += 1


class Devices:
    """Devices that are opened as they are asked for; those in `broken` are of no use."""

    def __init__(self, broken: Sequence[int] = ()) -> None:
        self.broken = broken
        self.opened: list[int] = []
        self.mixes: dict[int, PretendMix] = {}

    def open(self, device: int) -> PretendMix:
        self.opened.append(device)
        if device in self.broken:
            raise BackendUnavailable(f"device {device} is of no use")
        return self.mixes.setdefault(device, PretendMix())


def copied_to_the_host(digests: PageDigests) -> None:
    """Let it read device memory through a block of host memory, as it is memory of the host in truth."""
    reads = BlockReads(HostCopier(), PrivateBlock(3 * NBYTES), 3 * NBYTES)
    digests._reads._blocks = dict.fromkeys(range(3), reads)


@pytest.mark.parametrize("kind", DigestKind)
def test_regions_in_many_places_have_the_digests_of_their_bytes_in_their_order(kind: DigestKind) -> None:
    devices = Devices(broken=[2])
    digests = PageDigests(devices.open)
    copied_to_the_host(digests)
    regions = [region(0, 1), region(1), region(2, 0), region(3, 2), region(1, 1), region(0, 1)]
    assert np.array_equal(digests(kind, regions, PAGES), page_digests(kind, on_host(regions), PAGES))
    if kind is DigestKind.MIX64:
        assert devices.mixes[1].asked == [[0], [1, 0]]
        assert devices.mixes[0].asked == [[2]]
    else:
        assert devices.opened == []


def test_a_device_is_opened_once_and_one_that_is_of_no_use_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    devices = Devices(broken=[1])
    digests = PageDigests(devices.open)
    copied_to_the_host(digests)
    with caplog.at_level(logging.WARNING, "pdlink.backends"):
        for _ in range(3):
            digests(DigestKind.MIX64, [region(0, 0), region(1, 1)], PAGES)
    assert devices.opened == [0, 1]
    assert [one.getMessage() for one in caplog.records] == [
        "pages of device 1 are copied to the host to be digested: device 1 is of no use"
    ]


@pytest.mark.parametrize(
    ("devices", "broken", "kind"),
    [
        ([None, None], [], DigestKind.XXH3_64),
        ([0, 0], [], DigestKind.MIX64),
        ([None, 1], [], DigestKind.MIX64),
        ([0, 1], [1], DigestKind.XXH3_64),
        ([], [], DigestKind.XXH3_64),
    ],
)
def test_an_owner_makes_what_is_quickest_where_its_pages_lie(
    devices: list[int | None], broken: list[int], kind: DigestKind
) -> None:
    regions = [region(row, device) for row, device in enumerate(devices)]
    assert PageDigests(Devices(broken).open).choose("auto", regions) is kind


@pytest.mark.parametrize("setting", ["xxh3-64", "mix64"])
@pytest.mark.parametrize("device", [None, 0])
def test_an_owner_makes_what_it_is_set_to(setting: str, device: int | None) -> None:
    found = PageDigests(Devices().open).choose(setting, [region(0, device)])
    assert found.value == setting


def test_what_a_device_says_of_its_failure_reaches_the_caller() -> None:
    class Failing(PretendMix):
        def digests(self, regions: Sequence[Region], pages: Int64Array) -> Digests:
            raise BackendError("device 0 could not make digests")

    with pytest.raises(BackendError, match="could not make"):
        PageDigests(lambda device: Failing())(DigestKind.MIX64, [region(0, 0)], PAGES)


def test_threads_that_share_a_device_take_turns() -> None:
    """By the very operations of a device, all of which write into the same memory."""

    class OneMemory(TorchMix):
        def close(self) -> None:
            pass

    def open_mix(device: int) -> OneMemory:
        scratch = torch.zeros(SCRATCH_WORDS, dtype=torch.int64)
        return OneMemory(scratch, lambda one: torch.from_numpy(host_rows(one)))

    digests = PageDigests(open_mix)
    wanted = [page_digests(DigestKind.MIX64, on_host([region(row, 0)]), PAGES) for row in range(4)]
    at_once = threading.Barrier(4)

    def run(row: int) -> bool:
        at_once.wait(30)
        found = [digests(DigestKind.MIX64, [region(row, 0)], PAGES) for _ in range(50)]
        return all(np.array_equal(one, wanted[row]) for one in found)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, range(4))) == [True] * 4


def test_closed_digests_are_made_no_more_and_closing_twice_closes_a_device_once() -> None:
    devices = Devices()
    digests = PageDigests(devices.open)
    digests(DigestKind.MIX64, [region(0, 0)], PAGES)
    digests.close()
    digests.close()
    assert devices.mixes[0].closed == 1
    for kind in DigestKind:
        with pytest.raises(BackendError, match="closed"):
            digests(kind, [region(0, 0)], PAGES)
    assert devices.opened == [0]


def test_a_torch_that_sees_no_device_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from pdlink.backends.device_mix import DeviceMix

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match=r"torch \S+ sees no CUDA device; install a CUDA build of torch"):
        DeviceMix(0)


def test_host_memory_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pdlink.backends.device_mix", ModuleType("nothing"))
    digests = PageDigests()
    for kind in DigestKind:
        assert np.array_equal(digests(kind, [region(2)], PAGES), page_digests(kind, [region(2)], PAGES))
    assert digests.choose("auto", [region(2)]) is DigestKind.XXH3_64


RUNS = (ints([2, 17, 30]), ints([5, 8, 11]))


@pytest.mark.parametrize("kind", DigestKind)
def test_pages_are_packed_where_they_are_digested(kind: DigestKind) -> None:
    """On the device by its own copies, some pages at a time; those of the host, and copies of others, on the host."""
    devices = Devices(broken=[2])
    opened: list[int] = []

    def packs(device: int) -> PagePacks:
        opened.append(device)
        return PagePacks(HostCopier(), PrivateBlock(60), 60)  # two packed pages and no third

    digests = PageDigests(devices.open, packs)
    copied_to_the_host(digests)
    regions = [region(0, 1), region(1, 1), region(2), region(3, 2)]
    runs = [RUNS, None, RUNS, RUNS]
    wanted = page_digests(kind, on_host(regions), PAGES, runs=runs)
    assert np.array_equal(digests(kind, regions, PAGES, runs=runs), wanted)
    assert np.array_equal(digests(kind, regions, PAGES, runs=runs), wanted)
    assert opened == ([1] if kind is DigestKind.MIX64 else [])
    digests.close()
    digests.close()


def test_a_packed_page_that_is_larger_than_the_block_is_refused() -> None:
    digests = PageDigests(Devices().open, lambda _: PagePacks(HostCopier(), PrivateBlock(23), 23))
    with pytest.raises(BackendError, match="packed page of 24 bytes is too large to be digested in 23 bytes"):
        digests(DigestKind.MIX64, [region(0, 0)], PAGES, runs=[RUNS])
