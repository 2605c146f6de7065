"""Owns mix64, the page digest that any kind of memory can compute by a reduction, and its form for memory of the host.

A page is read as little-endian words of 8 bytes, the last one filled up with zeros. With `mixed` the finaliser below
and all arithmetic modulo 2^64:

    key[i]  = mixed((i + 1) * GAMMA)                     the i-th number of the generator SplitMix64, seed 0
    digest  = mixed(sum(mixed(word[i] ^ key[i])) + page_bytes * GAMMA)

so that words may be mixed anywhere, in any order, and only their sum has to come together. `mixed` is a bijection:
damage within one word, such as a flipped bit, always changes the digest. Other accidental damage (words or halves that
changed places, a page shifted by some words, zeros, another page) goes unseen with a chance of 2^-64. It is no
cryptographic hash: who wants to can make two pages of one digest.

GAMMA and the finaliser are those of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014; in Sebastiano Vigna's C code, which is in the public domain), whose shifts and multipliers are
variant 13 of David Stafford's for the finaliser of MurmurHash3.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pdlink.transfer.descriptors import Int64Array

Words = npt.NDArray[np.uint64]

WORD_BYTES = 8
GAMMA = 0x9E3779B97F4A7C15
SHIFTS = (30, 27, 31)
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
BLOCK_WORDS = 1 << 14
"""Mixed at a time on the host: 128 KiB, which with as much again for what is shifted stays in the cache of a core."""
_KEPT_BLOCKS = 16


def mix64(pages: npt.NDArray[np.uint8], ids: Int64Array) -> Words:
    """uint64 [n]: the digests of rows `ids` (int64 [n]) of `pages` (uint8 [m, page_bytes]), whose rows may lie apart
    but not their bytes. Takes 256 KiB beside them."""
    nbytes = pages.shape[1]
    num_words, tail = divmod(nbytes, WORD_BYTES)
    whole: Words = pages[:, : num_words * WORD_BYTES].view(np.uint64)
    sums = np.zeros(len(ids), dtype=np.uint64)
    for first in range(0, num_words, BLOCK_WORDS):
        words = whole[:, first : first + BLOCK_WORDS]
        width = words.shape[1]
        for some in cuts(len(ids), max(1, BLOCK_WORDS // width)):
            sums[some] += _sum_mixed(words[ids[some]], first)
    if tail:
        last = np.zeros((len(ids), WORD_BYTES), dtype=np.uint8)
        last[:, :tail] = pages[:, num_words * WORD_BYTES :][ids]
        sums += _sum_mixed(last.view(np.uint64), num_words)
    return seal(sums, nbytes)


def seal(sums: Words, page_bytes: int) -> Words:
    """uint64 [n]: digests, from the sums of mixed words of pages of `page_bytes`."""
    return mixed(sums + np.uint64(page_bytes * GAMMA % (1 << 64)))


def mixed(words: Words) -> Words:
    """The finaliser of each word, in place; returns them."""
    spare = np.empty_like(words)
    for number, shift in enumerate(SHIFTS):
        np.right_shift(words, np.uint64(shift), out=spare)
        words ^= spare
        if number < len(MULTIPLIERS):
            words *= np.uint64(MULTIPLIERS[number])
    return words


def cuts(length: int, step: int) -> Iterator[slice]:
    """The slices of at most `step` that make up [0, length)."""
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _sum_mixed(words: Words, first: int) -> Words:
    """uint64 [n]: the sum of each row of `words` (uint64 [n, width], written over), which are words of their pages from
    `first` on. They belong to one block."""
    words ^= _keys(first // BLOCK_WORDS)[first % BLOCK_WORDS :][: words.shape[1]]
    total: Words = mixed(words).sum(axis=1, dtype=np.uint64)
    return total


@lru_cache(_KEPT_BLOCKS)
def _keys(block: int) -> Words:
    """The keys of the words of one block: uint64 [BLOCK_WORDS]."""
    first = block * BLOCK_WORDS + 1
    keys = mixed(np.arange(first, first + BLOCK_WORDS, dtype=np.uint64) * np.uint64(GAMMA))
    keys.setflags(write=False)
    return keys
