"""What mix64 is, in plain numbers, and what damage it finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.transfer.mix64 import BLOCK_WORDS, GAMMA, mix64, mixed
from tests.transfer.values import ints

MASK = (1 << 64) - 1
LENGTHS = st.integers(0, 17) | st.sampled_from([63, 64, 65, 132, 656, 657, 1000])


def plain_mixed(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & MASK
    return word ^ word >> 31


def plain(page: bytes) -> int:
    total = len(page) * GAMMA
    for number in range(-(-len(page) // 8)):
        word = int.from_bytes(page[8 * number : 8 * number + 8], "little")
        total += plain_mixed(word ^ plain_mixed((number + 1) * GAMMA & MASK))
    return plain_mixed(total & MASK)


def digest(page: bytes) -> int:
    return int(mix64(np.frombuffer(page, dtype=np.uint8)[None], ints([0]))[0])


def random_page(nbytes: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def test_its_finaliser_gives_the_numbers_of_splitmix64() -> None:
    """The first outputs of that generator from seed 0, as its reference code prints them."""
    states = np.arange(1, 4, dtype=np.uint64) * np.uint64(GAMMA)
    assert mixed(states).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_its_values_stay_as_they_are_because_other_versions_make_them_too() -> None:
    pages = [b"", b"\0", b"\0" * 8, b"\0" * 9, bytes(range(17)), random_page(656)]
    assert [digest(one) for one in pages] == [
        0x0000000000000000,
        0x568A9B0B1A2C05EC,
        0x3500C0E53FA8015B,
        0x11E7DE05FA3E6D17,
        0xCF1E696C365BA85F,
        0xCD4A0923AEBDD16E,
    ]


@given(LENGTHS, st.integers(0, 9), st.integers(0, 1 << 32), st.data())
def test_pages_at_any_distance_have_the_digests_of_plain_numbers(
    nbytes: int, gap: int, seed: int, data: st.DataObject
) -> None:
    memory = np.random.default_rng(seed).integers(0, 256, (6, nbytes + gap), dtype=np.uint8)
    ids = data.draw(st.lists(st.integers(0, 5), max_size=8))
    found = mix64(memory[:, :nbytes], ints(ids))
    assert found.tolist() == [plain(memory[one, :nbytes].tobytes()) for one in ids]


def test_pages_larger_than_what_is_mixed_at_a_time_have_them_too() -> None:
    for nbytes in (8 * BLOCK_WORDS, 8 * BLOCK_WORDS + 8, 16 * BLOCK_WORDS + 3):
        page = random_page(nbytes)
        assert digest(page) == plain(page)


@given(LENGTHS.filter(bool), st.data())
def test_any_flipped_bit_is_found(nbytes: int, data: st.DataObject) -> None:
    page = bytearray(random_page(nbytes))
    bit = data.draw(st.integers(0, 8 * nbytes - 1))
    before = digest(page)
    page[bit // 8] ^= 1 << bit % 8
    assert digest(page) != before


@given(st.integers(2, 90), st.data())
def test_words_that_changed_places_are_found(num_words: int, data: st.DataObject) -> None:
    words = np.frombuffer(random_page(8 * num_words), dtype=np.uint64).copy()
    before = digest(words.tobytes())
    one, other = sorted(data.draw(st.sets(st.integers(0, num_words - 1), min_size=2, max_size=2)))
    words[[one, other]] = words[[other, one]]
    assert digest(words.tobytes()) != before


PAGE = random_page(656)
DAMAGE = {
    "halves changed places": PAGE[328:] + PAGE[:328],
    "rows changed places": PAGE[:64] + PAGE[128:192] + PAGE[64:128] + PAGE[192:],
    "shifted by a word": PAGE[8:] + PAGE[:8],
    "shifted by a word, zeros come in": b"\0" * 8 + PAGE[:-8],
    "shifted by a byte": PAGE[1:] + PAGE[:1],
    "backwards": PAGE[::-1],
    "zeros at the start": b"\0" * 64 + PAGE[64:],
    "zeros at the end": PAGE[:-64] + b"\0" * 64,
    "zeros in the middle": PAGE[:128] + b"\0" * 8 + PAGE[136:],
    "all zeros": b"\0" * 656,
    "all ones": b"\xff" * 656,
    "every byte 1": b"\1" * 656,
    "another page": random_page(656, 2),
    "half of another page": PAGE[:328] + random_page(656, 2)[328:],
    "one word everywhere": PAGE[:8] * 82,
    "every word negated": bytes(255 - one for one in PAGE),
    "cut": PAGE[:-8],
    "longer by zeros": PAGE + b"\0" * 8,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_of_every_common_kind_is_found(name: str) -> None:
    assert DAMAGE[name] != PAGE
    assert digest(DAMAGE[name]) != digest(PAGE)


def test_damaged_pages_differ_from_each_other_too() -> None:
    equal_bytes = [bytes([one]) * 656 for one in range(2, 255)]
    zeros = [b"\0" * one for one in range(99)]
    everything = [PAGE, *DAMAGE.values(), *equal_bytes, *zeros]
    assert len({digest(one) for one in everything}) == len(everything)


def test_each_bit_of_a_page_changes_about_half_of_the_digest() -> None:
    """Over all bits of a page; of 64 bits 32 are expected, and an average that is far off means a weak finaliser."""
    page = np.frombuffer(random_page(64), dtype=np.uint8)
    flipped = np.repeat(page[None], 512, axis=0)
    flipped[np.arange(512), np.arange(512) // 8] ^= (1 << np.arange(512) % 8).astype(np.uint8)
    changed = mix64(flipped, np.arange(512)) ^ mix64(page[None], ints([0]))
    counts = np.unpackbits(changed.view(np.uint8).reshape(512, 8), axis=1).sum(axis=1)
    assert 31 < counts.mean() < 33
    assert counts.min() > 10


def test_no_pages_have_no_digests() -> None:
    assert mix64(np.zeros((3, 20), dtype=np.uint8), ints([])).shape == (0,)
