"""torch computes the mix64 that numpy does, bit for bit. Here on the CPU, by the operations that a GPU runs too."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlink.backends import torch_mix
from pdlink.backends.torch_mix import KEY_WORDS, SCRATCH_WORDS, TorchMix
from pdlink.layout.regions import Region
from pdlink.transfer.digests import DigestKind, host_rows, page_digests
from tests.transfer.values import ints

NUM_PAGES = 7
PAGE_BYTES = st.integers(1, 17) | st.sampled_from([24, 132, 656, 1001, 8448, 41_984])


def open_mix() -> TorchMix:
    return TorchMix(torch.zeros(SCRATCH_WORDS, dtype=torch.int64), lambda one: torch.from_numpy(host_rows(one)))


@pytest.fixture(scope="module")
def mix() -> TorchMix:
    return open_mix()


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> TorchMix:
    """What takes very large pages, or very many of them, in goes of a few words and pages."""
    sizes = {"MIX_WORDS": 64, "KEY_WORDS": 16, "MAX_PAGES": 5}
    for name, size in sizes.items():
        monkeypatch.setattr(torch_mix, name, size)
    monkeypatch.setattr(torch_mix, "SCRATCH_WORDS", 2 * 64 + 16 + 2 * 5)
    return TorchMix(torch.zeros(154, dtype=torch.int64), lambda one: torch.from_numpy(host_rows(one)))


@dataclass(frozen=True)
class Memory:
    """Regions in one array, which lives as long as this does."""

    array: np.ndarray
    regions: tuple[Region, ...]


def make_memory(sizes: list[tuple[int, int]], offset: int = 0, seed: int = 3) -> Memory:
    """`sizes`: (bytes of a page, bytes between two) of each region."""
    lengths = [NUM_PAGES * (nbytes + gap) for nbytes, gap in sizes]
    # Whole words, so that only `offset` decides whether the first page begins at one.
    array = np.random.default_rng(seed).integers(0, 1 << 63, sum(lengths) // 8 + 2, dtype=np.uint64).view(np.uint8)
    regions, at = [], int(array.ctypes.data) + offset
    for layer, ((nbytes, gap), length) in enumerate(zip(sizes, lengths, strict=True)):
        regions.append(Region("latent", layer, at, nbytes + gap, nbytes, NUM_PAGES))
        at += length
    return Memory(array, tuple(regions))


def by_numpy(memory: Memory, ids: np.ndarray) -> np.ndarray:
    return page_digests(DigestKind.MIX64, memory.regions, ids)


@settings(max_examples=80)
@given(
    st.lists(st.tuples(PAGE_BYTES, st.sampled_from([0, 0, 1, 8, 368])), min_size=1, max_size=4),
    st.integers(0, 8),
    st.lists(st.integers(0, NUM_PAGES - 1), max_size=9),
    st.integers(0, 1 << 32),
)
def test_both_make_the_same_of_any_page_size_stride_address_and_order(
    mix: TorchMix, sizes: list[tuple[int, int]], offset: int, ids: list[int], seed: int
) -> None:
    memory = make_memory(sizes, offset, seed)
    assert np.array_equal(mix.digests(memory.regions, ints(ids)), by_numpy(memory, ints(ids)))


@pytest.mark.parametrize("fill", [0, 0x7F, 0x80, 0xFF])
def test_words_whose_sign_is_set_are_no_exception(mix: TorchMix, fill: int) -> None:
    memory = make_memory([(656, 0), (661, 0)])
    memory.array[:] = fill
    ids = ints(range(NUM_PAGES))
    found = mix.digests(memory.regions, ids)
    assert np.array_equal(found, by_numpy(memory, ids))
    assert len(np.unique(found)) == 2


@pytest.mark.parametrize("offset", [0, 3])
def test_what_does_not_fit_the_scratch_memory_is_mixed_in_several_goes(small_steps: TorchMix, offset: int) -> None:
    """Pages of more words than there are keys, more of them than ids, regions that share a go."""
    memory = make_memory([(8, 0), (8, 8), (120, 0), (128, 0), (136, 0), (137, 0), (1000, 24), (1001, 0)], offset)
    ids = ints([6, 0, 1, 5, 2, 3, 4, 4, 0, 6, 1])
    for _ in range(2):  # what is left in the scratch memory matters to nobody
        assert np.array_equal(small_steps.digests(memory.regions, ids), by_numpy(memory, ids))


def test_a_page_larger_than_all_keys_has_its_digest_too(mix: TorchMix) -> None:
    nbytes = 8 * KEY_WORDS + 13
    array = np.random.default_rng(5).integers(0, 256, 2 * nbytes, dtype=np.uint8)
    memory = Memory(array, (Region("latent", 0, int(array.ctypes.data), nbytes, nbytes, 2),))
    assert np.array_equal(mix.digests(memory.regions, ints([1, 0])), by_numpy(memory, ints([1, 0])))


def test_the_pages_are_only_read_and_all_that_is_written_is_the_scratch_memory() -> None:
    scratch = torch.zeros(SCRATCH_WORDS, dtype=torch.int64)
    mix = TorchMix(scratch, lambda one: torch.from_numpy(host_rows(one)))
    memory = make_memory([(656, 8), (133, 0)], offset=1)
    before = memory.array.copy()
    mix.digests(memory.regions, ints(range(NUM_PAGES)))
    assert np.array_equal(memory.array, before)
    assert bool(scratch.any())


def test_no_pages_and_no_regions_have_no_digests(mix: TorchMix) -> None:
    assert mix.digests(make_memory([(40, 0)]).regions, ints([])).shape == (1, 0)
    assert mix.digests([], ints([1])).shape == (0, 1)
