"""Owns what a pool asks of a device, as a protocol: memory that peers map, and two lanes of work. It implements none.

COMPUTE is the engine's stream as it is when a call is made; FETCH is the pool's own. Work in a lane runs in order, and
later than the call that launched it; nothing here waits for a device but what says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import torch

from pdlink.layout.regions import MemoryKind
from pdlink.memory.communicator import Communicator


class Lane(IntEnum):
    COMPUTE = 0
    FETCH = 1


class TroubleKind(IntEnum):
    """What work in a lane found wrong. From then on copies write 0xFF, until it is cleared."""

    LATE = 1
    """A word of another rank did not reach its value in time."""
    TRAILER = 2
    """What a broadcast brought is not what its owner sent."""
    OVERWRITTEN = 3
    """A rank changed rows without having waited for a gather of this one."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """The first of what went wrong: `rank` is whose word or broadcast, `wanted` and `seen` the two values."""

    kind: TroubleKind
    rank: int
    wanted: int
    seen: int


@dataclass(frozen=True, slots=True)
class PageList:
    """Page ids on the device: int64 count, then as many ids, at `address`. `kept` keeps them there.

    There is room for `num_pages` ids. The count is as many, but in a list that is filled anew for each replay of a
    graph.
    """

    address: int
    num_pages: int
    kept: Any = None


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Pages of `page_bytes` from `source` to `target`, both addresses of page 0, which the device can reach.

    A packed side holds the i-th page of the list at place i, any other at the place of its id.
    """

    source: int
    target: int
    page_bytes: int
    pages: PageList
    source_is_packed: bool = False
    target_is_packed: bool = False

    @property
    def nbytes(self) -> int:
        return self.pages.num_pages * self.page_bytes


class DeviceMemory(Protocol):
    """Zero-filled memory of this process that peers may map until `close`, which may come twice."""

    address: int
    nbytes: int

    @property
    def tensor(self) -> torch.Tensor:
        """uint8 [nbytes] over it."""

    def close(self) -> None: ...


class PeerMemory(Protocol):
    """Memory of a peer, mapped for this device at `address` until `close`, which may come twice."""

    address: int
    nbytes: int

    def close(self) -> None: ...


class DataLink(Protocol):
    """Broadcasts between the ranks of one group, in the FETCH lane."""

    def broadcast(self, address: int, nbytes: int, root: int) -> None:
        """Launch it; all ranks do, in the same order."""

    def abort(self) -> None:
        """End what may never end; nothing more is launched. Twice is fine."""

    def close(self) -> None:
        """Everything launched is over. Twice is fine."""


class PoolDevice(Protocol):
    """One device as one rank uses it. One thread launches at a time; `close` twice is fine."""

    memory: MemoryKind
    index: int
    torch_device: torch.device
    identity: str
    """32 hexadecimal digits that are the device's in every process."""

    def reaches(self, identity: str) -> bool:
        """Whether this process sees that device, and this one can read its memory."""

    @property
    def is_capturing(self) -> bool:
        """Whether what is launched in COMPUTE is captured into a graph, and not done.

        So is then what is launched in FETCH behind a `fork`; it has to be joined before the capture ends.
        """

    def allocate(self, nbytes: int) -> DeviceMemory:
        """Raises `BackendUnavailable` when the device has not that much memory."""

    def show(self, memory: DeviceMemory) -> dict[str, Any]:
        """JSON values by which a peer maps it. Raises `RegionError` where none can."""

    def map(self, shown: dict[str, Any]) -> PeerMemory:
        """Raises `BackendUnavailable` or `PeerGone`."""

    def link(self, communicator: Communicator) -> DataLink:
        """A link of the ranks of `communicator`. Collective; bounded by its timeout."""

    def list_pages(self, page_ids: np.ndarray) -> PageList:
        """int64 [n] to the device, for copies in the FETCH lane."""

    def scratch(self, shape: Sequence[int]) -> torch.Tensor:
        """uint8 tensor of private memory, for both lanes."""

    def fill(self, target: torch.Tensor, values: np.ndarray) -> None:
        """In FETCH: the first int64 of `target`, a tensor from `scratch`, become `values`, which may change at once."""

    def fork(self) -> None:
        """What is launched in FETCH from here on runs after what is in COMPUTE now."""

    def mark(self) -> object:
        """The place behind what is in FETCH now."""

    def join(self, mark: object) -> None:
        """What is launched in COMPUTE from here on runs after the mark."""

    def is_over(self, mark: object) -> bool:
        """Whether the work before the mark is done. Raises `BackendError` when the device has failed."""

    def advance(self, lane: Lane, word: int, value: int) -> None:
        """Let the int64 at `word`, which only this lane writes, be at least `value`, after all before it in the lane,
        and visible to peers."""

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
        """What follows in the lane runs once the int64 of every rank has reached `value`, which counts from the int64
        at `base` (0: from 0) as it is then.

        One that has not within `timeout_s` is trouble, and what follows runs all the same; then the int64 at `broken`
        (0: none) says so to peers, before that: it becomes at least as much.
        """

    def look_for_broken(self, words: Sequence[int], ranks: Sequence[int], value: int) -> None:
        """In FETCH: an int64 that has reached `value` is trouble."""

    def copy(self, copy: PageCopy) -> None:
        """In FETCH. 0xFF instead of the pages once there is trouble."""

    def stamp(self, address: int, words: np.ndarray) -> None:
        """In FETCH: write int64 [n <= 16] at `address`, or zeros once there is trouble."""

    def check_stamp(self, address: int, words: np.ndarray, rank: int) -> None:
        """In FETCH: anything but `words` at `address` is trouble."""

    def trouble(self) -> Trouble | None:
        """What has been found so far."""

    def clear_trouble(self) -> None:
        """Forget it; nothing is under way in FETCH."""

    def close(self) -> None: ...
