"""Owns the kernels of a pool's lanes for one device, and their launches. What they do is in `pool.cu`.

A launch costs the host a few microseconds, which is what a read of few tokens takes: parameters are kept ready.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdlink.backends.cuda_driver import bindings, num_multiprocessors, on_device
from pdlink.backends.cuda_kernels import CHUNK_BYTES, NUM_THREADS, WORD_BYTES, load_kernels
from pdlink.errors import BackendError, InvalidInput

MAX_RANKS = 64
STAMP_WORDS = 16
UNIT_ALIGNMENT = 16
TROUBLE_WORDS = 4
"""Of a place where trouble is told: its kind, rank, the value wanted and the value seen; all int64."""

_Int64 = ctypes.c_longlong
_Words = _Int64 * (2 * MAX_RANKS)
_Stamp = _Int64 * STAMP_WORDS
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "pool_advance": (_Int64, _Int64),
    "pool_wait": (_Words, ctypes.c_int, *[_Int64] * 6),
    "pool_look": (_Words, ctypes.c_int, _Int64, _Int64, _Int64),
    "pool_stamp": (_Int64, _Stamp, ctypes.c_int, _Int64),
    "pool_check": (_Int64, _Stamp, ctypes.c_int, _Int64, _Int64, _Int64),
    **{f"pool_copy_{word}": (*[_Int64] * 6, ctypes.c_int, ctypes.c_int, _Int64) for word in WORD_BYTES},
}


@dataclass(frozen=True, slots=True)
class Cut:
    """How a page is cut into units, which a block copies one by one: words of `word_bytes`, `unit_bytes` at a time."""

    word_bytes: int
    unit_bytes: int
    units_per_page: int

    @classmethod
    def of(cls, source: int, target: int, page_bytes: int) -> Cut:
        """For pages of `page_bytes` that lie one behind the other from two addresses."""
        common = math.gcd(source, target, page_bytes)
        word = next(word for word in WORD_BYTES if common % word == 0)
        units = -(-page_bytes // CHUNK_BYTES)
        unit_bytes = -(-page_bytes // (units * UNIT_ALIGNMENT)) * UNIT_ALIGNMENT
        return cls(word, unit_bytes, units)


class PoolKernels:
    """Launches on streams of one device, given as addresses. One thread.

    `here` and `told` are where trouble is told, in memory of the device and of the host; `num_blocks` bounds how much
    of the device a copy takes (None: all of it).
    """

    def __init__(self, device: int, here: int, told: int, num_blocks: int | None = None) -> None:
        """Compiles the kernels (about 0.3 s, once in a process). Raises `BackendUnavailable`."""
        constants = {"CHUNK": CHUNK_BYTES, "THREADS": NUM_THREADS, "MAX_RANKS": MAX_RANKS, "STAMP_WORDS": STAMP_WORDS}
        found = load_kernels(device, "pool.cu", tuple(_SIGNATURES), **constants)
        self._kernels = {name: _Kernel(found[name], types) for name, types in _SIGNATURES.items()}
        self._device = device
        self._here, self._told = here, told
        self.num_blocks = num_blocks or num_multiprocessors(device)

    def advance(self, stream: int, word: int, value: int) -> None:
        self._launch("pool_advance", stream, 1, 1, word, value)

    def wait(
        self,
        stream: int,
        words: Sequence[int],
        ranks: Sequence[int],
        value: int,
        timeout_s: float,
        broken: int,
        base: int = 0,
    ) -> None:
        limit = int(timeout_s * 1e9)
        values = (_both(words, ranks), len(words), value, base, limit, broken, self._here, self._told)
        self._launch("pool_wait", stream, 1, MAX_RANKS, *values)

    def look(self, stream: int, words: Sequence[int], ranks: Sequence[int], value: int) -> None:
        self._launch("pool_look", stream, 1, MAX_RANKS, _both(words, ranks), len(words), value, self._here, self._told)

    def stamp(self, stream: int, address: int, words: np.ndarray) -> None:
        self._launch("pool_stamp", stream, 1, STAMP_WORDS, address, words.tolist(), len(words), self._here)

    def check(self, stream: int, address: int, words: np.ndarray, rank: int) -> None:
        self._launch(
            "pool_check", stream, 1, STAMP_WORDS, address, words.tolist(), len(words), rank, self._here, self._told
        )

    def copy(
        self,
        stream: int,
        source: int,
        target: int,
        page_bytes: int,
        pages: int,
        num_pages: int,
        source_is_packed: bool,
        target_is_packed: bool,
    ) -> None:
        """`pages` is the address of a list of at most `num_pages` pages, and `num_pages` is at least 1."""
        cut = Cut.of(source, target, page_bytes)
        blocks = min(self.num_blocks, num_pages * cut.units_per_page)
        places = (source, target, page_bytes, cut.unit_bytes, cut.units_per_page, pages)
        packed = (int(source_is_packed), int(target_is_packed))
        self._launch(f"pool_copy_{cut.word_bytes}", stream, blocks, NUM_THREADS, *places, *packed, self._here)

    def load(self, stream: int, empty_list: int, word: int) -> None:
        """Launch each kernel once, with nothing to do. A kernel's first launch loads it, for which the device may have
        to be idle, as it is not while another kernel waits for a peer.

        `empty_list` is the address of a zero, `word` of an int64 that is at least 0.
        """
        nothing = np.zeros(0, np.int64)
        self.advance(stream, word, 0)
        self.wait(stream, (), (), 0, 1.0, 0)
        self.look(stream, (), (), 0)
        self.stamp(stream, word, nothing)
        self.check(stream, word, nothing, 0)
        for one in WORD_BYTES:
            values = (0, 0, UNIT_ALIGNMENT, UNIT_ALIGNMENT, 1, empty_list, 0, 0, self._here)
            self._launch(f"pool_copy_{one}", stream, 1, NUM_THREADS, *values)

    def _launch(self, name: str, stream: int, blocks: int, threads: int, *values: Any) -> None:
        with on_device(self._device):
            self._kernels[name].launch(name, stream, blocks, threads, values)


class _Kernel:
    """A kernel, and the place from which its parameters are taken when it is launched."""

    def __init__(self, function: Any, types: Sequence[Any]) -> None:
        self._function = function
        self._values = [one() for one in types]
        self._places = (ctypes.c_void_p * len(types))(*(ctypes.addressof(one) for one in self._values))
        self._address = ctypes.addressof(self._places)

    def launch(self, name: str, stream: int, blocks: int, threads: int, values: Sequence[Any]) -> None:
        for place, value in zip(self._values, values, strict=True):
            if isinstance(value, int):
                place.value = value
            else:
                place[: len(value)] = value
        driver = bindings()
        (code,) = driver.cuLaunchKernel(self._function, blocks, 1, 1, threads, 1, 1, 0, stream, self._address, 0)
        if code != driver.CUresult.CUDA_SUCCESS:
            raise BackendError(f"the launch of {name} failed: {code}")


def _both(words: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """The kernel's `Words`: room for all addresses, then the ranks."""
    if len(words) > MAX_RANKS:
        raise InvalidInput(f"a shard group of more than {MAX_RANKS + 1} ranks on devices: {len(words)} others")
    return [*words, *[0] * (MAX_RANKS - len(words)), *ranks]
