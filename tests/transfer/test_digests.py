import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pdlink.layout import MemoryKind, Region
from pdlink.transfer.digests import DigestKind, DigestTable, cells_in_order, first_difference, page_digests
from tests.transfer.values import ints

NUM_PAGES, NBYTES, STRIDE = 6, 41, 48

every_kind = pytest.mark.parametrize("kind", DigestKind)


@pytest.fixture(scope="module")
def memory():
    return np.random.default_rng(7).integers(0, 256, (3, NUM_PAGES, STRIDE), dtype=np.uint8)


def regions(memory):
    base = memory.__array_interface__["data"][0]
    return [Region("latent", row, base + row * NUM_PAGES * STRIDE, STRIDE, NBYTES, NUM_PAGES) for row in range(3)]


@every_kind
@given(st.integers(0, 2), st.integers(0, NUM_PAGES - 1), st.integers(0, NBYTES * 8 - 1))
def test_a_flipped_bit_is_found_with_its_row_and_page(kind, memory, row, page, bit):
    pages = ints([4, 0, 5, 1, 2, 3])
    before = page_digests(kind, regions(memory), pages)
    memory[row, page, bit // 8] ^= 1 << (bit % 8)
    after = page_digests(kind, regions(memory), pages)
    memory[row, page, bit // 8] ^= 1 << (bit % 8)
    assert first_difference(before, after) == (row, pages.tolist().index(page))
    assert int((before != after).sum()) == 1


@every_kind
def test_equal_bytes_at_other_addresses_have_equal_digests(kind, memory):
    copy = memory.copy()
    pages = ints(range(NUM_PAGES))
    one, two = page_digests(kind, regions(memory), pages), page_digests(kind, regions(copy), pages)
    assert one.dtype == np.uint64
    assert one.shape == (3, NUM_PAGES)
    assert len(np.unique(one)) == one.size
    assert first_difference(one, two) is None


@every_kind
def test_bytes_between_pages_are_no_part_of_a_digest(kind, memory):
    copy = memory.copy()
    copy[:, :, NBYTES:] ^= 0xFF
    pages = ints(range(NUM_PAGES))
    assert (
        first_difference(page_digests(kind, regions(memory), pages), page_digests(kind, regions(copy), pages)) is None
    )


@every_kind
def test_two_pages_that_changed_places_are_found(kind, memory):
    mixed = page_digests(kind, regions(memory), ints([1, 0, 2]))
    assert first_difference(page_digests(kind, regions(memory), ints([0, 1, 2])), mixed) == (0, 0)


@every_kind
def test_no_pages_or_no_regions_have_no_digests(kind, memory):
    assert page_digests(kind, regions(memory), ints([])).shape == (3, 0)
    assert page_digests(kind, [], ints([1, 2])).shape == (0, 2)
    assert first_difference(page_digests(kind, [], ints([1])), page_digests(kind, [], ints([1]))) is None


def test_device_memory_is_never_read_as_host_memory():
    region = Region("latent", 0, 4096, NBYTES, NBYTES, 1, MemoryKind.CUDA)
    with pytest.raises(AssertionError, match="not host memory"):
        page_digests(DigestKind.XXH3_64, [region], ints([0]))


def test_both_sides_order_cells_by_component_and_layer():
    cells = [("index_k", 0), ("index_k", 8), ("latent", 2), ("latent", 10)]
    assert cells_in_order({"latent": (10, 2), "index_k": {8, 0}}) == cells
    assert cells_in_order({"index_k": (0, 8), "latent": (2, 10)}) == cells


@every_kind
def test_a_kind_is_known_by_its_name_alone(kind):
    assert DigestKind.named(kind.value) is kind
    assert DigestKind.named(kind.value.upper()) is None
    assert DigestKind.named("") is None


def test_kinds_keep_their_names_and_make_different_digests(memory):
    assert [one.value for one in DigestKind] == ["xxh3-64", "mix64"]
    pages = ints(range(NUM_PAGES))
    assert (
        page_digests(DigestKind.XXH3_64, regions(memory), pages)
        != page_digests(DigestKind.MIX64, regions(memory), pages)
    ).all()
    page = memory[0, 3, :NBYTES].tobytes()
    assert page_digests(DigestKind.XXH3_64, regions(memory)[:1], ints([3]))[0, 0] == xxhash.xxh3_64_intdigest(page)


def test_a_part_of_a_table_has_its_kind_and_its_rows_in_the_order_asked_for():
    table = DigestTable("mix64", np.arange(12, dtype=np.uint64).reshape(3, 4))
    assert table.part([2, 0], slice(1, 3)) == DigestTable("mix64", np.array([[9, 10], [1, 2]], dtype=np.uint64))
    assert table != DigestTable("xxh3-64", table.values)
    assert table != DigestTable("mix64", table.values + np.uint64(1))
    assert table != "mix64"


def test_a_reader_that_brings_other_pages_than_were_asked_for_is_a_bug_that_is_found(memory):
    short = regions(memory)[0]
    with pytest.raises(AssertionError, match="1 of 2 pages"):
        page_digests(
            DigestKind.MIX64, [short], ints([0, 1]), lambda region, pages: [(memory[0, :, :NBYTES], pages[:1])]
        )


@pytest.mark.parametrize("kind", DigestKind)
@pytest.mark.parametrize(
    "runs", [([0], [16]), ([8, 24, 40], [8, 8, 16]), ([1, 9], [3, 5]), ([6, 2], [2, 2]), ([0, 4, 12], [4, 4, 20])]
)
def test_a_packed_page_has_the_digest_of_its_runs_one_after_another(
    kind: DigestKind, runs: tuple[list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdlink.transfer.digests.PACKED_BYTES", 40)  # so that pages take several goes
    pages = np.random.default_rng(2).integers(0, 256, (5, 67), dtype=np.uint8)[:, :61]
    region = Region("k", 0, pages.ctypes.data, 67, 61, 5)
    packed = np.concatenate([pages[:, at : at + size] for at, size in zip(*runs, strict=True)], axis=1)
    there = Region("k", 0, packed.ctypes.data, packed.shape[1], packed.shape[1], 5)
    ids = ints([3, 0, 4])
    found = page_digests(kind, [region, region], ids, runs=[(ints(runs[0]), ints(runs[1])), None])
    assert np.array_equal(found[:1], page_digests(kind, [there], ids))
    assert np.array_equal(found[1:], page_digests(kind, [region], ids))
