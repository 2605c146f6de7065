"""Owns what a copier is, and which one serves a kind of memory: copies between addresses of this process, which pack
and unpack staging slots. The copies themselves are in `host_copy` and `cuda_copy`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pdlink.backends import host_copy
from pdlink.layout.regions import MemoryKind
from pdlink.transfer.descriptors import PullBatch


class Copying(Protocol):
    """A copy that was started. Its addresses belong to it until `is_over`, or until `wait` has returned or raised."""

    @property
    def is_over(self) -> bool:
        """Whether nothing of it moves any more. Never blocks."""

    def wait(self) -> None:
        """Wait until it is over. Raises `BackendError` when it went wrong; it is quiet then too."""


class Prepared(Protocol):
    """A copy that is ready to be started, once. Its addresses are in use from then on."""

    def start(self) -> Copying: ...


class _Done:
    """A copy that was made at once."""

    is_over = True

    def wait(self) -> None:
        pass


class Copier(ABC):
    """Copies for one thread at a time. The caller vouches for the addresses. `close` twice is fine."""

    wants_runs = True
    """Whether a run of pages is one copy, so that it pays to find runs; else every page is copied by itself."""

    @abstractmethod
    def copy(self, batch: PullBatch, stop: Callable[[], bool]) -> bool:
        """Copy every row of `batch`; False when `stop` said so before the end. Quiet when it returns or raises.

        Raises `BackendError` when a device cannot copy.
        """

    def start(self, batch: PullBatch) -> Copying:
        """Begin to copy every row of `batch`. Where nothing copies beside this thread, it is over on return."""
        self.copy(batch, lambda: False)
        return _Done()

    def prepare(self, batch: PullBatch) -> Prepared:
        """Do ahead what can be done of `start`. One that is never started costs nothing once it is forgotten."""
        return _Later(self, batch)

    def close(self) -> None:  # noqa: B027 - a copier of host memory holds nothing
        """Let go of what the copier holds. What was started must be over."""


@dataclass(frozen=True, slots=True)
class _Later:
    """Nothing was done ahead."""

    copier: Copier
    batch: PullBatch

    def start(self) -> Copying:
        return self.copier.start(self.batch)


class HostCopier(Copier):
    """Between host addresses, by this thread."""

    def copy(self, batch: PullBatch, stop: Callable[[], bool]) -> bool:
        return host_copy.copy(batch, stop)


def open_copier(memory: MemoryKind, device: int = 0) -> Copier:
    """The copier for memory of one kind and device. Raises `BackendUnavailable` where it does not work here."""
    if memory is MemoryKind.HOST:
        return HostCopier()
    from pdlink.backends.cuda_copy import DeviceCopier  # which is a Copier itself

    return DeviceCopier(device)
