"""Owns how a process digests pages of its regions: on the device that has them where that can make the kind, else on
the host, from where they lie or from a copy. What a digest is, is defined in `transfer`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Protocol

import numpy as np

from pdlink.backends.page_packs import PagePacks, open_packs
from pdlink.backends.page_reads import PageReads
from pdlink.errors import BackendError, BackendUnavailable
from pdlink.layout.regions import MemoryKind, Region
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.digests import DigestKind, Digests, Runs, page_digests

log = logging.getLogger("pdlink.backends")

CLOSED = "no digests are made any more: the worker is closed"


class Mix(Protocol):
    """What makes mix64 on one device, for one thread at a time."""

    def digests(self, regions: Sequence[Region], pages: Int64Array) -> Digests: ...

    def close(self) -> None: ...


def _open_mix(device: int) -> Mix:
    # Here, because a process without device memory has no use for it.
    from pdlink.backends.device_mix import DeviceMix

    return DeviceMix(device)


class _Turns:
    """A mix that threads take in turns: what it writes to is there once."""

    def __init__(self, mix: Mix, open_packs: Callable[[], PagePacks]) -> None:
        self._mix = mix
        self._open_packs = open_packs
        self._packs: PagePacks | None = None
        """Made when pages are packed first, as few sites have such."""
        self._lock = threading.Lock()
        self._closed = False

    def digests(self, regions: Sequence[Region], pages: Int64Array, runs: Sequence[Runs | None]) -> Digests:
        with self._lock:
            if self._closed:
                raise BackendError(CLOSED)
            if not any(runs):
                return self._mix.digests(regions, pages)
            found = np.zeros((len(regions), len(pages)), dtype=np.uint64)
            for row, (region, packed) in enumerate(zip(regions, runs, strict=True)):
                found[row] = self._packed(region, pages, packed) if packed else self._mix.digests([region], pages)[0]
            return found

    def _packed(self, region: Region, pages: Int64Array, runs: Runs) -> Digests:
        """uint64 [len(pages)]. Under the lock."""
        self._packs = self._packs or self._open_packs()
        made = [np.zeros(0, dtype=np.uint64)]
        for block in self._packs.read(region, pages, runs):
            made.append(self._mix.digests([block], np.arange(block.num_pages, dtype=np.int64))[0])
        return np.concatenate(made)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._mix.close()
            if self._packs:
                with suppress(BackendError):  # a device that has failed holds nothing that matters
                    self._packs.close()


class PageDigests:
    """Makes digests of pages of any region of this process. Thread-safe; `close` twice is fine.

    On each device whose pages it digests it holds 35 MiB, from the first packed ones on 28 MiB more, and 16 MiB of host
    memory for kinds that no device makes.
    """

    def __init__(
        self,
        open_mix: Callable[[int], Mix] = _open_mix,
        open_packs: Callable[[int], PagePacks] = open_packs,
    ) -> None:
        self._open_mix = open_mix
        self._open_packs = open_packs
        self._reads = PageReads()
        self._mixes: dict[int, _Turns | None] = {}
        """By device; None where it cannot be done there, which was logged."""
        self._lock = threading.Lock()
        self._closed = False

    def choose(self, setting: str, regions: Sequence[Region]) -> DigestKind:
        """The kind for an owner of `regions`: as `digest_kind` says, or under `auto` the one that is quickest there."""
        if setting != "auto":
            return DigestKind(setting)
        devices = {region.device for region in regions if region.memory is MemoryKind.CUDA}
        able = [self._mix(device) is not None for device in sorted(devices)]
        return DigestKind.MIX64 if able and all(able) else DigestKind.XXH3_64

    def __call__(
        self, kind: DigestKind, regions: Sequence[Region], pages: Int64Array, *, runs: Sequence[Runs | None] = ()
    ) -> Digests:
        """uint64 [len(regions), len(pages)]. `runs`, and what the caller vouches for, are as for `page_digests`.

        Raises `BackendError` when a device can neither digest nor copy.
        """
        digests = np.zeros((len(regions), len(pages)), dtype=np.uint64)
        start = 0
        for (memory, device), group in groupby(regions, key=lambda one: (one.memory, one.device)):
            same = list(group)
            mix = self._mix(device) if kind is DigestKind.MIX64 and memory is MemoryKind.CUDA else None
            rows = slice(start, start + len(same))
            some = runs[rows] if runs else [None] * len(same)
            if mix:
                digests[rows] = mix.digests(same, pages, some)
            else:
                digests[rows] = page_digests(kind, same, pages, self._reads, runs=some)
            start = rows.stop
        return digests

    def close(self) -> None:
        """Waits for digests under way on a device."""
        with self._lock:
            self._closed = True
            mixes, self._mixes = self._mixes, {}
        for mix in mixes.values():
            if mix:
                mix.close()
        self._reads.close()

    def _mix(self, device: int) -> _Turns | None:
        with self._lock:
            if self._closed:
                raise BackendError(CLOSED)
            if device not in self._mixes:
                self._mixes[device] = self._opened(device)
            return self._mixes[device]

    def _opened(self, device: int) -> _Turns | None:
        try:
            return _Turns(self._open_mix(device), lambda: self._open_packs(device))
        except BackendUnavailable as error:
            log.warning("pages of device %d are copied to the host to be digested: %s", device, error)
            return None
