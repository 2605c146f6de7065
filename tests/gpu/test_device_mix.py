"""A GPU computes the digests that the host does, and waits for nobody's stream while it does so."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from pdlink.backends import device_mix
from pdlink.backends.cuda_driver import DeviceBlock, find_allocation
from pdlink.backends.device_mix import DeviceMix
from pdlink.backends.page_digests import PageDigests
from pdlink.errors import BackendError, BackendUnavailable, RegionError
from pdlink.layout.regions import MemoryKind, Region
from pdlink.transfer.digests import DigestKind
from pdlink.transfer.mix64 import mix64
from tests.gpu.test_link_gpu import blocked_streams
from tests.transfer.values import ints

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

SHAPES = [
    (41_984, 41_984, 0),
    (8_448, 8_448, 0),
    (656, 656, 0),
    (656, 1024, 0),
    (132, 132, 4),
    (8_448, 8_449, 3),
    (8 * (1 << 18) + 8, 8 * (1 << 18) + 16, 8),
    ((3 << 20) + 5, (3 << 20) + 5, 1),
    *((nbytes, nbytes + 3, 1) for nbytes in range(1, 18)),
]
"""(bytes of a page, stride, offset): pages of GLM-5.2, rows in a larger stride, odd addresses, pages with more words
than there are keys, and all tails."""


@pytest.fixture(scope="module")
def mix():
    made = DeviceMix(0)
    yield made
    made.close()


class Pages:
    """Pages of one size with random bytes, on a device and on the host."""

    def __init__(self, page_bytes, stride=0, offset=0, num_pages=9, seed=1, device=0):
        import torch

        self.stride = stride or page_bytes
        nbytes = offset + num_pages * self.stride
        self.bytes = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
        self.tensor = torch.from_numpy(self.bytes).to(f"cuda:{device}")
        torch.cuda.synchronize(device)
        self.rows = np.lib.stride_tricks.as_strided(self.bytes[offset:], (num_pages, page_bytes), (self.stride, 1))
        where = (self.tensor.data_ptr() + offset, self.stride, page_bytes, num_pages)
        self.region = Region("latent", seed, *where, MemoryKind.CUDA, device)

    def digests(self, ids):
        return mix64(self.rows, ids)


@pytest.mark.parametrize(("page_bytes", "stride", "offset"), SHAPES)
def test_it_makes_the_digests_of_the_host_for_any_page_size_stride_and_address(mix, page_bytes, stride, offset):
    pages = Pages(page_bytes, stride, offset)
    ids = ints([8, 0, 3, 4, 3])
    assert np.array_equal(mix.digests([pages.region], ids)[0], pages.digests(ids))


def test_regions_of_several_sizes_are_rows_of_one_answer(mix):
    several = [Pages(nbytes, seed=seed) for seed, nbytes in enumerate((8448, 8448, 41_984, 41_984, 41_984, 132))]
    ids = ints([2, 7, 1])
    found = mix.digests([one.region for one in several], ids)
    assert np.array_equal(found, np.stack([one.digests(ids) for one in several]))
    assert mix.digests([], ids).shape == (0, 3)
    assert mix.digests([several[0].region], ints([])).shape == (1, 0)


def test_more_pages_than_are_mixed_at_a_time_have_their_digests(mix):
    """Several scratch buffers full, more pages than ids are kept at a time, and regions that share a buffer."""
    many, large = [Pages(16, num_pages=150_000, seed=seed) for seed in range(2)], Pages(41_984, num_pages=1500)
    ids = np.random.default_rng(4).permutation(150_000).astype(np.int64)
    found = mix.digests([one.region for one in many], ids)
    assert np.array_equal(found, np.stack([one.digests(ids) for one in many]))
    assert np.array_equal(mix.digests([large.region], ids[ids < 1500])[0], large.digests(ids[ids < 1500]))


def test_a_page_past_two_to_the_31_bytes_has_its_digest(mix):
    import torch

    num_pages, page_bytes = 3 * 1024 * 1024 + 2, 1024
    tensor = torch.zeros(num_pages * page_bytes, dtype=torch.uint8, device="cuda:0")
    data = np.random.default_rng(6).integers(0, 256, (2, page_bytes), dtype=np.uint8)
    tensor[-2 * page_bytes :] = torch.from_numpy(data.reshape(-1)).to("cuda:0")
    torch.cuda.synchronize(0)
    region = Region("latent", 0, tensor.data_ptr(), page_bytes, page_bytes, num_pages, MemoryKind.CUDA, 0)
    found = mix.digests([region], ints([num_pages - 1, num_pages - 2]))[0]
    assert np.array_equal(found, mix64(data, ints([1, 0])))


def test_one_flipped_bit_of_many_pages_is_found(mix):
    pages = Pages(41_984, num_pages=200)
    ids = ints(range(200))
    pages.tensor[137 * 41_984 + 20_001] ^= 16
    import torch

    torch.cuda.synchronize(0)
    assert np.flatnonzero(mix.digests([pages.region], ids)[0] != pages.digests(ids)).tolist() == [137]


def test_digests_are_made_while_the_streams_of_the_engine_are_blocked(mix):
    """The default stream among them. No memory of torch's is taken for them, which could wait for such a stream."""
    import torch

    pages = [
        Pages(656, 1024, num_pages=500),
        Pages(8_449, seed=2, num_pages=500),
        Pages(41_984, seed=3, num_pages=1000),
    ]
    ids = ints(range(499, -1, -1))
    wanted = np.stack([one.digests(ids) for one in pages])
    mix.digests([one.region for one in pages], ids)
    reserved = torch.cuda.memory_reserved(0)
    with blocked_streams() as streams:
        found = mix.digests([one.region for one in pages], ids)
        assert not any(stream.query() for stream in streams)
    assert np.array_equal(found, wanted)
    assert torch.cuda.memory_reserved(0) == reserved


def test_the_current_stream_and_device_of_the_caller_stay_as_they_were(mix):
    import torch

    last = torch.cuda.device_count() - 1
    pages = Pages(656)
    side = torch.cuda.Stream(last)
    with torch.cuda.device(last), torch.cuda.stream(side):
        mix.digests([pages.region], ints([1]))
        assert torch.cuda.current_device() == last
        assert torch.cuda.current_stream() == side


@pytest.mark.gpu(2)
def test_each_device_digests_what_it_has(mix):
    digests = PageDigests()
    pages = [Pages(8448, seed=seed, device=seed % 2) for seed in range(4)]
    ids = ints([5, 1])
    found = digests(DigestKind.MIX64, [one.region for one in pages], ids)
    assert np.array_equal(found, np.stack([one.digests(ids) for one in pages]))
    digests.close()


@pytest.mark.parametrize("kind", DigestKind)
@pytest.mark.parametrize("runs", [([0, 256, 512], [128, 128, 64]), ([4, 100], [8, 4]), ([3, 9, 600], [1, 7, 55])])
def test_packed_pages_have_the_digests_of_their_runs_on_the_device_and_on_the_host(kind, runs):
    """More of them than one block holds."""
    pages = Pages(656, 1024, num_pages=200_000)
    there = Region("latent", 0, pages.bytes.ctypes.data, 1024, 656, 200_000)
    ids = np.random.default_rng(5).permutation(200_000)
    packed = (ints(runs[0]), ints(runs[1]))
    digests = PageDigests()
    both = digests(kind, [pages.region, there, pages.region], ids, runs=[packed, packed, None])
    assert np.array_equal(both[0], both[1])
    assert np.array_equal(both[2], digests(kind, [there], ids)[0])
    digests.close()


@pytest.mark.parametrize("kind", DigestKind)
def test_host_and_device_memory_of_the_same_bytes_have_the_same_digests(kind):
    """Through a copy too, where the device does not make that kind."""
    pages = Pages(656, 1024, num_pages=60)
    there = Region("latent", 0, pages.bytes.ctypes.data, 1024, 656, 60)
    digests = PageDigests()
    assert digests.choose("auto", [pages.region]) is DigestKind.MIX64
    both = digests(kind, [pages.region, there], ints([59, 0, 7]))
    assert np.array_equal(both[0], both[1])
    digests.close()


def test_threads_share_one_scratch_memory_in_turns():
    digests = PageDigests()
    pages = [Pages(41_984, seed=seed, num_pages=300) for seed in range(4)]
    ids = ints(range(300))
    wanted = [one.digests(ids) for one in pages]
    wrong: list[int] = []

    def run(number: int) -> None:
        for _ in range(10):
            if not np.array_equal(digests(DigestKind.MIX64, [pages[number].region], ids)[0], wanted[number]):
                wrong.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert wrong == []
    assert not any(one.is_alive() for one in threads)
    digests.close()


def test_closing_gives_the_scratch_memory_back_and_twice_is_fine(monkeypatch):
    blocks: list[DeviceBlock] = []

    def block(nbytes: int, device: int) -> DeviceBlock:
        blocks.append(DeviceBlock(nbytes, device))
        return blocks[-1]

    monkeypatch.setattr(device_mix, "DeviceBlock", block)
    made = DeviceMix(0)
    assert [find_allocation(one.address, 0).start for one in blocks] == [one.address for one in blocks]
    made.close()
    made.close()
    # What is free on the device tells nothing while other processes use it as well.
    for one in blocks:
        with pytest.raises(RegionError):
            find_allocation(one.address, 0)


def test_a_device_that_is_not_there_is_of_no_use_and_says_so():
    import torch

    with pytest.raises(BackendUnavailable, match="is none of the"):
        DeviceMix(torch.cuda.device_count())


def test_closed_digests_are_made_no_more():
    digests, pages = PageDigests(), Pages(656)
    digests(DigestKind.MIX64, [pages.region], ints([1]))
    digests.close()
    with pytest.raises(BackendError, match="closed"):
        digests(DigestKind.MIX64, [pages.region], ints([1]))
