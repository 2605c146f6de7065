"""Owns a device of pretence for pools: its memory is shared memory of this host, and its FETCH lane is a thread that is
late on purpose. COMPUTE is the thread that calls.

Whoever does not fork, join or wait for a word where it must has wrong bytes here.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from pdlink.backends.shm import AttachedSegment, Segment, attach
from pdlink.errors import PdlinkError, StateError
from pdlink.layout.regions import MemoryKind
from pdlink.memory.communicator import Communicator, GroupCommunicator
from pdlink.memory.pool_device import Lane, PageCopy, PageList, Trouble, TroubleKind

LATE_S = 5e-4
POISON = 0xFF


class SegmentMemory:
    """A block of the device's memory."""

    def __init__(self, nbytes: int) -> None:
        self._segment = Segment.create(nbytes)
        self.address, self.nbytes, self.name = self._segment.address, nbytes, self._segment.name
        self._tensor: torch.Tensor | None = torch.from_numpy(self._segment.array)

    @property
    def tensor(self) -> torch.Tensor:
        assert self._tensor is not None
        return self._tensor

    def close(self) -> None:
        self._tensor = None
        self._segment.close()


class GlooLink:
    """Broadcasts by a gloo group of its own, from the lane's thread."""

    def __init__(self, device: ThreadDevice, communicator: Communicator) -> None:
        self._device = device
        self._group = device.communicator(communicator.global_ranks, timeout_s=communicator.timeout_s)
        self._is_aborted = False
        self._group.watch = self._check

    def _check(self) -> None:
        if self._is_aborted:
            raise StateError("aborted")

    def broadcast(self, address: int, nbytes: int, root: int) -> None:
        def run() -> None:
            if not self._is_aborted:
                # One that is aborted, or never comes, leaves the bytes as they are.
                with contextlib.suppress(PdlinkError):
                    self._group.broadcast(torch.from_numpy(words_at(address, nbytes, np.uint8)), root, "data")

        self._device.launch(run)

    def abort(self) -> None:
        self._is_aborted = True
        self._device.launch(self._group.abandon)

    def close(self) -> None:
        self._is_aborted = True
        self._device.launch(self._group.close)


class Mark:
    """A place in the lane; in a graph, another one at each replay."""

    def __init__(self) -> None:
        self.event = threading.Event()


class ThreadDevice:
    """Implements `PoolDevice`. `communicator` makes the groups that broadcast; graphs of it are `thread_graph`."""

    memory, index, torch_device = MemoryKind.HOST, 0, torch.device("cpu")
    identity = "0" * 32

    def __init__(self, communicator: type[GroupCommunicator] = GroupCommunicator, late_s: float = LATE_S) -> None:
        self.communicator = communicator
        self.late_s = late_s
        self._random = random.Random(7)
        self._steps: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._trouble: Trouble | None = None
        self._graph: list[Callable[[], None]] | None = None
        self._is_joined = True
        self._thread = threading.Thread(target=self._run, name="pdlink-pretend-lane", daemon=True)
        self._thread.start()
        self._is_closed = False

    def reaches(self, identity: str) -> bool:
        return identity == self.identity

    def allocate(self, nbytes: int) -> SegmentMemory:
        return SegmentMemory(nbytes)

    def show(self, memory: Any) -> dict[str, Any]:
        return {"name": memory.name, "nbytes": memory.nbytes}

    def map(self, shown: dict[str, Any]) -> AttachedSegment:
        return attach(shown["name"], shown["nbytes"])

    def link(self, communicator: Communicator) -> GlooLink:
        return GlooLink(self, communicator)

    def list_pages(self, page_ids: np.ndarray) -> PageList:
        kept = np.concatenate([[len(page_ids)], page_ids]).astype(np.int64)
        return PageList(kept.ctypes.data, len(page_ids), kept)

    def scratch(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=torch.uint8)

    def fill(self, target: torch.Tensor, values: np.ndarray) -> None:
        assert not self.is_capturing
        given = values.copy()

        def run() -> None:
            words_at(target.data_ptr(), given.nbytes)[:] = given

        self.launch(run)

    @property
    def is_capturing(self) -> bool:
        return self._graph is not None

    def capture_into(self, steps: list[Callable[[], None]]) -> None:
        """What is launched from here on is written down, to be done at each replay."""
        assert self._graph is None
        self._graph, self._is_forked, self._is_joined = steps, False, True
        self._last: Mark | None = None

    def end_capture(self) -> bool:
        """Whether COMPUTE has joined all that was launched in FETCH."""
        self._graph = None
        return self._is_joined

    def launch(self, step: Callable[[], None]) -> None:
        if self._graph is None:
            self._steps.put(step)
            return
        assert self._is_forked, "work in FETCH that is not behind a fork is no part of a graph"
        self._last, self._is_joined = None, False
        self._graph.append(lambda: self._steps.put(step))

    def fork(self) -> None:
        """COMPUTE has done all that it was asked for."""
        if self._graph is not None:
            self._is_forked, self._is_joined = True, False

    def mark(self) -> Mark:
        mark = Mark()
        if self._graph is None:
            self._steps.put(mark.event.set)
            return mark

        def again() -> None:
            mark.event = threading.Event()
            self._steps.put(mark.event.set)

        self._graph.append(again)
        self._last = mark
        return mark

    def join(self, mark: object) -> None:
        assert isinstance(mark, Mark)

        def wait() -> None:
            assert mark.event.wait(60), "the lane's thread is stuck"

        if self._graph is None:
            wait()
            return
        self._graph.append(wait)
        self._is_joined = self._is_joined or mark is self._last

    def is_over(self, mark: object) -> bool:
        assert isinstance(mark, Mark)
        return mark.event.is_set()

    def advance(self, lane: Lane, word: int, value: int) -> None:
        def run() -> None:
            at = words_at(word, 8)
            at[0] = max(int(at[0]), value)

        self._in(lane, run)

    def wait_for(
        self,
        lane: Lane,
        words: Sequence[int],
        ranks: Sequence[int],
        value: int,
        timeout_s: float,
        broken: int = 0,
        base: int = 0,
    ) -> None:
        def run() -> None:
            until = time.monotonic() + timeout_s
            wanted = value + (int(words_at(base, 8)[0]) if base else 0)
            for word, rank in zip(words, ranks, strict=True):
                at = words_at(word, 8)
                while at[0] < wanted and self._trouble is None:
                    if time.monotonic() > until:
                        self._found(TroubleKind.LATE, rank, wanted, int(at[0]))
                    time.sleep(1e-4)
            if self._trouble is not None and broken:
                words_at(broken, 8)[0] = wanted

        self._in(lane, run)

    def look_for_broken(self, words: Sequence[int], ranks: Sequence[int], value: int) -> None:
        def run() -> None:
            for word, rank in zip(words, ranks, strict=True):
                seen = int(words_at(word, 8)[0])
                if seen >= value:
                    self._found(TroubleKind.OVERWRITTEN, rank, value, seen)

        self.launch(run)

    def copy(self, copy: PageCopy) -> None:
        def run() -> None:
            ids = words_at(copy.pages.address, 8 * (1 + copy.pages.num_pages))
            assert ids[0] <= copy.pages.num_pages
            nbytes = copy.page_bytes
            for place, page in enumerate(ids[1 : 1 + ids[0]].tolist()):
                target = copy.target + (place if copy.target_is_packed else page) * nbytes
                if self._trouble is not None:
                    ctypes.memset(target, POISON, nbytes)
                else:
                    ctypes.memmove(target, copy.source + (place if copy.source_is_packed else page) * nbytes, nbytes)

        self.launch(run)

    def stamp(self, address: int, words: np.ndarray) -> None:
        given = words.copy()

        def run() -> None:
            words_at(address, given.nbytes)[:] = 0 if self._trouble else given

        self.launch(run)

    def check_stamp(self, address: int, words: np.ndarray, rank: int) -> None:
        given = words.copy()

        def run() -> None:
            seen = words_at(address, given.nbytes)
            wrong = np.flatnonzero(seen != given)
            if len(wrong):
                self._found(TroubleKind.TRAILER, rank, int(given[wrong[0]]), int(seen[wrong[0]]))

        self.launch(run)

    def trouble(self) -> Trouble | None:
        return self._trouble

    def clear_trouble(self) -> None:
        self._trouble = None

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._steps.put(None)
            self._thread.join(60)

    def _found(self, *facts: Any) -> None:
        if self._trouble is None:
            self._trouble = Trouble(*facts)

    def _in(self, lane: Lane, step: Callable[[], None]) -> None:
        if lane is Lane.FETCH:
            self.launch(step)
        elif self._graph is not None:
            self._graph.append(step)
        else:
            step()

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            time.sleep(self._random.random() * self.late_s)
            step()


def words_at(address: int, nbytes: int, dtype: type = np.int64) -> np.ndarray:
    """The memory at an address."""
    return np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address)).view(dtype)
